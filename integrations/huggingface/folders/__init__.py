"""Folders of Hugging Face: read by slice, written whole, their config and names for Transformers' own models."""
