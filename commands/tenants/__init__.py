"""What `train` is made of where many tenants share a base: their files, their loop, evaluations and sweeps."""
