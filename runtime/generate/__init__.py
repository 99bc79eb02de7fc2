"""Text from the model that is trained: which token comes next, whose keys are kept, which rows a step has."""
