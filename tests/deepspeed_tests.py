"""The files of tests/integrations/deepspeed as a package: that folder's own name is the name of the product's."""

from pathlib import Path

__path__ = [str(Path(__file__).parent / "integrations" / "deepspeed")]
