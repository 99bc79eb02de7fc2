"""Textbook optimizers, adapters and errors that proofs compare a host with; no trainer is imported."""
