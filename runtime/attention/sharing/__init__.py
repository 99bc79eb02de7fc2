"""Attention of sequences that several ranks share: rings, all-gathers, all-to-alls, and moved tokens."""
