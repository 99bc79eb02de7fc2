"""Which ranks compute which parts of samples: those that share one, and Megatron's context-parallel ones."""
