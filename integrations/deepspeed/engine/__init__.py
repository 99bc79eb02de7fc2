"""A model, its optimizer and checkpoints in a DeepSpeed engine that runs planned steps."""
