"""Megatron's own GPT model with attention over packs: positions by token, linear layers, weights from the seed."""
