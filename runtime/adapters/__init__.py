"""Low-rank adapters of many tenants beside a frozen model, on hooks of its own linear layers."""
