if __name__ != "evenload.plugins.packing":
    raise ImportError(f"{__name__}: import this package as evenload.plugins.packing; a second copy would mean a second registry")
