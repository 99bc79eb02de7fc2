"""Plans in the loops of Transformers' Trainer and of Accelerate."""
