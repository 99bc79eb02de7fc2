"""The best of all settings of a recipe: bounded before they are planned, planned in the order of their bounds."""
