"""Policies of data in a run: what they are shown, and what their answers change."""
