"""The samples of a user's own Megatron batch, in whatever form its iterator gives them."""
