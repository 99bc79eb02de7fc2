"""Low-rank adapters of many tenants on a frozen model, on hooks of its own linear layers."""
