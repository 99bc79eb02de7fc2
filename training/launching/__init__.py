"""Starting local ranks, and what is said where no rank could speak for itself."""
