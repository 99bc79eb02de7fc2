"""What Megatron's own schedules alone run, and no order of a plan: model chunks, and further tokens."""
