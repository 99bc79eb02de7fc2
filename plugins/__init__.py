"""The plugins. Importing this package imports each folder in it, and each registers itself."""

if __name__ != "evenload.plugins":
    raise ImportError(
        f"{__name__}: import this package as evenload.plugins; a second copy would mean a second registry"
    )

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
