if __name__ != "evenload.runtime":
    raise ImportError(
        f"{__name__}: import this package as evenload.runtime; a second copy would mean a second registry"
    )
