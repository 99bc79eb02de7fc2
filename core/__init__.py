"""The shared language of evenload: numpy only, no torch, no trainer."""

if __name__ != "evenload.core":
    raise ImportError(f"{__name__}: import this package as evenload.core; a second copy would mean a second registry")
