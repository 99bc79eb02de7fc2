"""What a Megatron loop must look like for its micro-batches to be regrouped exactly."""
