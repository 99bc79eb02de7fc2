"""A call of Megatron's schedule as a plan: whose samples they are, and which micro-batches replace the user's."""
