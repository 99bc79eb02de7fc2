"""The recipe: its sections, how it is read, and the combinations that no trainer can run."""
