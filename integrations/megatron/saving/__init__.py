"""Megatron's own checkpoints, written and read from one process a rank."""
