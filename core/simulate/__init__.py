"""A plan in simulated time: when every pass of every rank and stage starts and ends."""

from .step import simulate

__all__ = ["simulate"]
