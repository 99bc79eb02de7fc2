"""What a user gives: files and values are read, held to bounds and explained here and nowhere else."""
