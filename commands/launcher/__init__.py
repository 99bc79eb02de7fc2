"""The launcher of local ranks, and what it says where no rank could speak for itself."""
