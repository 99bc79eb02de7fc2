if __name__ != "evenload.plugins":
    raise ImportError(f"{__name__}: import this package as evenload.plugins; a second copy would mean a second registry")
