"""DeepSpeed's converter of checkpoints, in a process of its own that ends with the rank that started it.

converter.py PARENT ARGUMENTS...   those of ``deepspeed.checkpoint.ds_to_universal``; PARENT: the rank's process id

Left alone it would go on after its rank was killed, and write into the folder in which the next attempt works. Its pool
of workers would wait for ever: each of them holds the pipe open that would tell it. So the kernel ends all of them.
"""

from __future__ import annotations

import os
import runpy
import sys

from ...runtime.orphans import die_with_parent

if __name__ == "__main__":
    os.register_at_fork(after_in_child=die_with_parent)
    die_with_parent()
    if os.getppid() != int(sys.argv.pop(1)):
        sys.exit("the rank that asked for the conversion has ended")
    runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__", alter_sys=True)
