"""What `evenload doctor` says of this installation."""
