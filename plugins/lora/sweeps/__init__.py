"""Who goes on: evaluations of tenants, patience, sweeps and their rungs."""
