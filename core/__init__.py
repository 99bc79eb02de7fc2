if __name__ != "evenload.core":
    raise ImportError(f"{__name__}: import this package as evenload.core; a second copy would mean a second registry")
