if __name__ != "evenload.data":
    raise ImportError(f"{__name__}: import this package as evenload.data; a second copy would mean a second registry")
