"""What is written down of tenants: numbers, adapters, checkpoints."""
