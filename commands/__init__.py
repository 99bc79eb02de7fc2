"""What the `evenload` command shows, and its verbs that start no rank of ours. The top floor."""

if __name__ != "evenload.commands":
    raise ImportError(
        f"{__name__}: import this package as evenload.commands; a second copy would mean a second registry"
    )
