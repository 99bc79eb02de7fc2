"""What a plan is: slices, micro-batches, the plan of a step, who holds which tokens, in which order passes run."""
