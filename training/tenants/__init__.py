"""Many tenants on one base: their loop, and what a run of them answers."""
