"""What `train` is made of: a variant of its run, where its rows go, and what it comes to."""
