"""Steps of a Trainer whose rows stay together in units."""
