"""Half of a world switched on, by each launcher's way of losing variables: what is said, when all have ended. Measured.

    python benchmarks/faults/half_a_world.py [--only TEXT] [--json] [--out FILE]

Two ranks of a script of Transformers' Trainer; rank 0 has what `evenload run` sets, rank 1 what the launcher brings
there when it is not told to carry it: nothing of ours. Processes have the variables that the launcher itself leaves in
them, which choose the remedy that is printed; torchrun's two agents are real, the others stand-ins. Ray's case needs an
installation of its own: tests/programs/test_ray.py.

seconds     from the moment both ranks have met to the end of the last process
said        the message of rank 0; rank 1 knows nothing of evenload and ends as its peer is gone
carry       the words of the remedy that belong to the launcher
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenload.api import load_recipe
from evenload.commands.env import variables
from evenload.commands.tables.show import emit, grid

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "trainer_script.py"
MET = 'torch.distributed.init_process_group("gloo")\nprint("met", flush=True)\n'
LIMIT_S = 240.0
LAUNCHERS: Mapping[str, tuple[dict[str, str], str]] = {
    "torchrun, an agent a node": ({}, "`evenload env` prints"),
    "srun --export=NONE": ({"SLURM_PROCID": "{rank}"}, "srun --export=ALL"),
    "mpirun (Open MPI)": ({"OMPI_COMM_WORLD_RANK": "{rank}"}, "mpirun -x PYTHONPATH"),
    "mpiexec (MPICH)": ({"PMI_RANK": "{rank}"}, "mpirun -genvlist PYTHONPATH"),
    "deepspeed by ssh, PYTHON* reset": ({}, "`evenload env` prints"),
}
"""What a launcher leaves in its processes, and what has to be said to its user."""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def commands(launcher: str, script: Path, port: str) -> list[list[str]]:
    """Of both ranks."""
    plain = [sys.executable, str(script), str(script.parent / "out")]
    if not launcher.startswith("torchrun"):
        return [plain, plain]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "1"]
    return [[*agent, *plain[1:]]] * 2


def environment(launcher: str, rank: int, port: str, own: Mapping[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    clean |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    if not launcher.startswith("torchrun"):
        clean |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        clean |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    left = {name: value.format(rank=rank) for name, value in LAUNCHERS[launcher][0].items()}
    return clean | left | (dict(own) if rank == 0 else {})


def run(launcher: str, folder: Path) -> dict[str, Any]:
    script, port = folder / "train.py", free_port()
    script.write_text(SCRIPT.read_text().replace("torch.manual_seed(0)\n", MET + "torch.manual_seed(0)\n"))
    (folder / "recipe.yaml").write_text("trainer: transformers\nplugins: {packing: {enabled: true, max_tokens: 512}}\n")
    own = variables(load_recipe(folder / "recipe.yaml"))
    files = [(folder / f"rank{rank}").open("w+") for rank in (0, 1)]
    ranks = [
        subprocess.Popen(command, env=environment(launcher, rank, port, own), stdout=files[rank], stderr=files[rank])
        for rank, command in enumerate(commands(launcher, script, port))
    ]
    began_s, met_s = time.monotonic(), None
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < began_s + LIMIT_S:
        if met_s is None and all("met" in Path(file.name).read_text() for file in files):
            met_s = time.monotonic()
        time.sleep(0.05)
    ended_s, hung = time.monotonic(), [number for number, rank in enumerate(ranks) if rank.poll() is None]
    for rank in ranks:
        rank.kill()
        rank.wait()
    texts = [Path(file.name).read_text(errors="replace") for file in files]
    said = re.findall(r"^evenload: (rank 1 of 2 runs without evenload)$", texts[0], re.MULTILINE)
    row = {
        "launcher": launcher,
        "seconds": None if met_s is None else round(ended_s - met_s, 1),
        "codes": [rank.returncode for rank in ranks],
        "said": said,
        "carry": LAUNCHERS[launcher][1] in texts[0],
        "hung": hung,
    }
    return row | ({} if len(said) == 1 and not hung else {"output": [text[-2000:] for text in texts]})


def table(result: dict[str, Any]) -> Any:
    rows = []
    for row in result["rows"]:
        carry = LAUNCHERS[row["launcher"]][1] if row["carry"] else "not said"
        rows.append([row["launcher"], row["seconds"], len(row["said"]), " ".join(map(str, row["codes"])), carry])
    return grid("half a world, measured", ("launcher", "seconds", "messages", "exit codes", "carry"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="launchers whose name has this in it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for launcher in LAUNCHERS:
        if asked.only in launcher:
            with tempfile.TemporaryDirectory(prefix="evenload-half-") as folder:
                rows.append(run(launcher, Path(folder)))
                print(f"{rows[-1]['seconds']} s  {launcher}", file=sys.stderr)
    result = {"rows": rows}
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, asked.json, table)


if __name__ == "__main__":
    main()
