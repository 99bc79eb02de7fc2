"""Samples of prompts: how a recipe draws them, and what scores of the user's own come to."""
