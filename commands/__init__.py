"""What the `evenload` command does, one module a verb. The top floor: it may use every other."""

if __name__ != "evenload.commands":
    raise ImportError(
        f"{__name__}: import this package as evenload.commands; a second copy would mean a second registry"
    )
