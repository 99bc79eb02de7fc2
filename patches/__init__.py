if __name__ != "evenload.patches":
    raise ImportError(f"{__name__}: import this package as evenload.patches; a second copy would mean a second registry")
