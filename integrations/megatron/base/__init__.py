"""Megatron-Core itself: its versions, process groups and settings, and what planners must know of it."""
