"""What layers with experts need besides a trainer's own code: losses that depend on no plan, and headers of counts."""
