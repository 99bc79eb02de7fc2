"""From a recipe and lengths to a plan: the context of planners, the chain of plugins, the background planner."""
