"""A training run in Python: the job of a rank, its batches and steps, what it measures, records and saves."""

if __name__ != "evenload.training":
    raise ImportError(
        f"{__name__}: import this package as evenload.training; a second copy would mean a second registry"
    )
