"""The cases that `evenload profile` runs, and what memory it measures in them."""
