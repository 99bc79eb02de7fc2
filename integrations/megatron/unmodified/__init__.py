"""Megatron training loops that nobody edits: their samples regrouped, their forward step on planned packs."""
