"""What `evenload audit` judges: a script's first step, each of its samples beside itself alone."""
