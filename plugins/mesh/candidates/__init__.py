"""The plans that `mesh` chooses from: one module a family."""
