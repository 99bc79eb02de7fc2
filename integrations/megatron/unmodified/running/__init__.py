"""Planned micro-batches run through a user's own forward step, loss and reports."""
