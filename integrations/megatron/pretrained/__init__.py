"""Weights of Hugging Face folders in Megatron-Core's models, and out of them again."""
