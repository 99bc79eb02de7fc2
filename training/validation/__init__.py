"""Samples that a run scores and never trains on: which ones, when, and what their losses come to."""
