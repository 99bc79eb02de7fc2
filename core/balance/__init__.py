"""Dividing work evenly: sequences into parts of equal cost, bins under caps, and lower bounds."""
