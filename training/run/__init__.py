"""The steps of a run: a variant of it, and where its rows go."""
