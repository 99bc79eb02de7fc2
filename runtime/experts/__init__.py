"""What layers with experts need beside a trainer's own code."""
