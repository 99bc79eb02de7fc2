"""Hugging Face: the models that packed attention runs, and every script under Transformers' Trainer, planned."""
