"""What the routers of a model with experts need to know of a pack, and the losses that do not depend on the plan."""
