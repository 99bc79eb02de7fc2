"""The forms in which training loops hold their batches."""
