"""DeepSpeed's own converter of checkpoints, in a process of its own.

It ends with the rank that started it, and is kept from running code out of the files it reads.

    python -m evenload.integrations.deepspeed.engine.to_universal PARENT [--trust] ARGUMENTS...

PARENT is the rank's process id, ARGUMENTS are those of deepspeed.checkpoint.ds_to_universal.

Left alone it would go on after its rank was killed, and write into the folder in which the next attempt works. Its pool
of workers would wait for ever: each of them holds the pipe open that would tell it. So the kernel ends all of them.
"""

from __future__ import annotations

import os
import sys

from ....core.errors import EvenloadError
from ....runtime.watchdog.orphans import die_with_parent


def main(arguments: list[str]) -> None:
    """Convert. Raises EvenloadError for files that hold more than data."""
    # Seconds of importing, in which the rank may end as well.
    from deepspeed.checkpoint import ds_to_universal

    from ....runtime.unpickling import tensors_only
    from .checkpoint import DATA

    trust = "--trust" in arguments
    sys.argv = ["ds_to_universal", *(word for word in arguments if word != "--trust")]
    with tensors_only("the checkpoint", DATA, trust=trust):
        ds_to_universal.main(ds_to_universal.parse_arguments())


if __name__ == "__main__":
    os.register_at_fork(after_in_child=die_with_parent)
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the rank that asked for the conversion has ended")
    try:
        main(sys.argv[2:])
    except EvenloadError as error:
        sys.exit(f"{error.what}: {error.found}; {error.do}")
