"""Loads of experts: recorded ones replayed through planners of layers, and those that a run learns from."""
