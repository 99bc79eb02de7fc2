"""One rank of a test world (see conftest.py): joins, then runs the cases that the parent names, one after the other.

world_child.py FOLDER RANK SIZE. A case is a line of JSON on stdin: [number, file, function, arguments]. The answer is
the pickle of (ok, value or traceback) in FOLDER/answer.NUMBER.RANK. End of input ends the process.
"""

import datetime
import faulthandler
import importlib.util
import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist


def load(file: str) -> ModuleType:
    """Import a test module by its path, as pytest's importlib mode does: there is no package to find it in."""
    if file not in sys.modules:
        spec = importlib.util.spec_from_file_location(file, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[file])
    return sys.modules[file]


def run(file: str, function: str, arguments: list[Any]) -> tuple[bool, Any]:
    try:
        return True, getattr(load(file), function)(*arguments)
    except BaseException:
        return False, traceback.format_exc()


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    faulthandler.enable()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=150),
    )
    for line in sys.stdin:
        number, file, function, arguments = json.loads(line)
        answer = pickle.dumps(run(file, function, arguments))
        part = folder / f"part.{rank}"
        part.write_bytes(answer)
        os.replace(part, folder / f"answer.{number}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
