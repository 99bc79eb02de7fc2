"""Recipes, cost models and clusters that run as they stand."""

if __name__ != "evenload.recipes":
    raise ImportError(
        f"{__name__}: import this package as evenload.recipes; a second copy would mean a second registry"
    )
