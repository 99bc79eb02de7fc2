"""Which rank computes which tokens of which expert in a layer: quotas, their laws, and whose tokens go where."""
