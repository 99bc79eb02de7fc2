if __name__ != "evenload.data":
    raise ImportError(f"{__name__}: import this package as evenload.data; a second copy would mean a second registry")

from .lengths import read_lengths
from .samples.order import SampleOrder
from .sources import Source, open_source

__all__ = ["SampleOrder", "Source", "open_source", "read_lengths"]
