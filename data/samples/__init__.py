"""Samples of documents: how they are cut, in which order they come, and how many make a batch."""
