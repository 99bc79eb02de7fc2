"""Attention of a pack: causal inside each sequence and nowhere else, over kept prefixes too."""
