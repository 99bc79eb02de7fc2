"""DeepSpeed's own converter of checkpoints, in a process of its own, kept from running code out of the files it reads.

python -m evenload.integrations.deepspeed.to_universal [--trust] <arguments of deepspeed.checkpoint.ds_to_universal>
"""

from __future__ import annotations

import sys

from deepspeed.checkpoint import ds_to_universal

from ...core.errors import EvenloadError
from ...runtime.unpickling import tensors_only
from .checkpoint import DATA


def main(arguments: list[str]) -> None:
    """Convert. Raises EvenloadError for files that hold more than data."""
    trust = "--trust" in arguments
    sys.argv = ["ds_to_universal", *(word for word in arguments if word != "--trust")]
    with tensors_only("the checkpoint", DATA, trust=trust):
        ds_to_universal.main(ds_to_universal.parse_arguments())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except EvenloadError as error:
        sys.exit(f"{error.what}: {error.found}; {error.do}")
