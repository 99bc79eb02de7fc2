"""Seven journeys of a newcomer, timed: what is typed, how long it takes, how many pages have it. Measured.

    python benchmarks/journeys.py [--only TEXT] [--package FOLDER] [--json] [--out FILE]

    fine-tune   a model and chats of one's own to a folder that Transformers opens
    tenants     five customers' files to five adapters that PEFT opens
    plan        lengths to a page about 64 GPUs
    script      a script of Transformers' Trainer, checked and run, not edited
    off         the same, stopped under evenload and resumed without it, to the losses of a run that never stopped
    memory      a script that runs out of memory under evenload, and the setting that it fits with
    planner     a planning rule of one's own, in a package, to a plan by it

Each starts in an empty folder with what a newcomer brings (a model, chats, lengths, a script), on two CPU ranks. Typed:
commands. Minutes: wall clock from the first command to the last; CPU: of all processes, which a busy machine changes
less. Pages: the fewest pages, README first, on which all words of the commands and keys stand. Came out: whether what
was wanted is there; else the first message that stopped it.

--package is a folder with another version of evenload in it, such as a worktree of an earlier commit named `evenload`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.benchmarks.frame import ROOT, columns, main, options

CLUSTER = "parallel.dp=64 cluster=h200 costs=verl-7b train.global_batch_size=512 --lengths lengths.txt"
SMALL = "parallel: {dp: 2}\ntrain: {steps: 12, global_batch_size: 16, export: tuned}\n"
TUNE = """
trainer: megatron
model: {weights: model}
data: {source: chats.jsonl, max_length: 512, long_samples: truncate}
plugins: {packing: {enabled: true, max_tokens: 2048}}
"""
TENANTS = """
trainer: megatron
model: {weights: model}
parallel: {dp: 2}
plugins: {packing: {enabled: true, max_tokens: 4096}, lora: {enabled: true, tenants: customers, out: adapters}}
"""
CUSTOMER = """
data: {source: CHATS, max_length: 512, long_samples: truncate}
adapter: {r: 4, lora_alpha: 8}
train: {steps: 8, batch_size: 4, lr: 1.0e-2}
"""


LAUNCH = "torchrun --standalone --nproc-per-node 2 train.py"
CHANGES = {
    "max_steps=2": "max_steps=int(sys.argv[2])",
    "save_steps=1": "save_steps=1, logging_steps=1, lr_scheduler_type='constant'",
    ".train()": ".train(resume_from_checkpoint=len(sys.argv) > 3)",
}
"""What the script of `off` has that tests/scripts/trainer_script.py has not: steps and a resume as arguments."""
HELD = 62
"""Tokens that the card of `memory` holds: two rows of the longest sample, the script's own micro-batch."""
FITS = f"plugins.packing.max_tokens={HELD}"
FULL = f"""
def planted(module, arguments, named):
    if named["input_ids"].numel() > {HELD}:
        raise torch.OutOfMemoryError("CUDA out of memory (planted)")


LlamaForCausalLM.__init__ = lambda self, config, made=LlamaForCausalLM.__init__: (
    made(self, config),
    self.register_forward_pre_hook(planted, with_kwargs=True),
)[0]
"""
"""A card that is full, for machines without one."""


class Journey(NamedTuple):
    """What is typed, in order, and how it is known that it came out."""

    commands: tuple[str, ...]
    words: tuple[str, ...]
    """Of commands and keys, which a newcomer has to read somewhere."""
    came_out: Callable[[Path], bool]
    fails: str = ""
    """The command that ends with the trouble that the journey is about."""


def opens(folder: Path) -> bool:
    code = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(folder)!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def adapters(folder: Path) -> bool:
    """Whether PEFT opens five adapters over the model."""
    trained = sorted(map(str, folder.glob("adapters/*/last")))
    code = f"""
from peft import PeftModel
from transformers import AutoModelForCausalLM
for adapter in {trained!r}:
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(folder / "model")!r}), adapter)
"""
    opened = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return len(trained) == 5 and opened.returncode == 0


def never_stopped(folder: Path) -> bool:
    """Whether the resumed run has the losses of one that evenload never saw."""
    own = environment_of(folder)
    subprocess.run(f"{LAUNCH} stock 4", shell=True, cwd=folder, env=own, capture_output=True, check=True)
    states = [
        json.loads((folder / name / "checkpoint-4" / "trainer_state.json").read_text()) for name in ("out", "stock")
    ]
    resumed, stock = ([row["loss"] for row in state["log_history"] if "loss" in row] for state in states)
    return len(stock) == 4 and bool(np.allclose(resumed, stock, rtol=1e-4))


JOURNEYS = {
    "fine-tune": Journey(
        ("evenload train recipe.yaml",),
        ("evenload train", "weights:", "messages", "export:", "long_samples"),
        lambda folder: opens(folder / "tuned"),
    ),
    "tenants": Journey(
        ("evenload plan recipe.yaml", "evenload train recipe.yaml", "evenload lora adapters"),
        ("evenload train", "evenload lora", "tenants:", "out:", "adapter:", "batch_size:"),
        adapters,
    ),
    "plan": Journey(
        (
            f"evenload plan gpu-node {CLUSTER}",
            f"evenload plan gpu-node {CLUSTER} plugins.mesh.enabled=true --report report.html",
        ),
        ("evenload plan", "--lengths", "parallel.dp=", "cluster=", "costs=", "plugins.mesh", "--report"),
        lambda folder: (folder / "report.html").stat().st_size > 10_000,
    ),
    "script": Journey(
        (
            "evenload check hf-trainer -- torchrun --standalone --nproc-per-node 2 train.py out",
            "evenload run hf-trainer -- torchrun --standalone --nproc-per-node 2 train.py out",
        ),
        ("evenload check", "evenload run hf-trainer -- ", "torchrun"),
        lambda folder: (folder / "out" / "checkpoint-2").is_dir(),
    ),
    "off": Journey(
        (f"evenload run hf-trainer -- {LAUNCH} out 2", f"{LAUNCH} out 4 resume"),
        ("evenload run hf-trainer -- ", "without `evenload run RECIPE --`", "--resume_from_checkpoint"),
        lambda folder: never_stopped(folder),
    ),
    "memory": Journey(
        (f"evenload run hf-trainer -- {LAUNCH} out", f"evenload run hf-trainer {FITS} -- {LAUNCH} out"),
        ("Out of memory", "plugins.packing.max_tokens=", "your micro-batch size times your longest sample"),
        lambda folder: (folder / "out" / "checkpoint-2").is_dir(),
        fails=f"evenload run hf-trainer -- {LAUNCH} out",
    ),
    "planner": Journey(
        (
            "pip install ./own",
            "evenload plugins",
            "evenload plan quickstart plugins.packing.slices=off plugins.largest_first.enabled=true --out plan.json",
        ),
        ("entry point", "evenload.plugins", "plan(plan, context, config)", "register("),
        lambda folder: "largest_first" in json.loads((folder / "plan.json").read_text())["steps"][0]["made_by"],
    ),
}


def brought(name: str, folder: Path, model: Path) -> None:
    """What a newcomer has: a model with Qwen3's template, chats of several turns, lengths, a script, and the files that
    the pages let them write."""
    random = np.random.default_rng(0)
    shutil.copytree(model, folder / "model")
    (folder / "customers").mkdir()
    for whose in ("chats", "a", "b", "c", "d", "e"):
        rows = [json.dumps({"messages": chat(random)}) + "\n" for _ in range(200 if whose == "chats" else 40)]
        file = folder / f"{whose}.jsonl"
        file.write_text("".join(rows))
        if whose != "chats":
            (folder / "customers" / f"{whose}.yaml").write_text(CUSTOMER.replace("CHATS", str(file)))
    lengths = random.lognormal(np.log(665), 1.4, 4096).astype(int).clip(16, 131_072)
    (folder / "lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
    shutil.copytree(ROOT / "examples" / "third_party_plugin", folder / "own")
    script = (ROOT / "tests" / "scripts" / "trainer_script.py").read_text()
    if name == "off":
        for old, new in CHANGES.items():
            script = script.replace(old, new)
    if name == "memory":
        script = script.replace("torch.manual_seed(0)\n", f"torch.manual_seed(0)\n{FULL}")
    (folder / "train.py").write_text(script)


def chat(random: np.random.Generator) -> list[dict[str, str]]:
    """Several turns of words."""
    words = ["red", "green", "blue", "round", "square"]
    said = [" ".join(random.choice(words, random.integers(2, 40))) for _ in range(2 * random.integers(1, 4))]
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]


def own_model(folder: Path) -> Path:
    """A small model with the template of Qwen3, as its makers give it."""
    import trl
    from evenload.integrations.huggingface.examples import TINY_LLAMA
    from transformers import AutoTokenizer

    shutil.copytree(TINY_LLAMA.folder(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return folder


def pages_of(docs: Path, words: tuple[str, ...]) -> list[str]:
    """The fewest pages that together have all words, README first. Empty: no four of them do."""
    texts = {path.name: path.read_text() for path in (docs / "docs").glob("*.md")}
    readme = (docs / "README.md").read_text()
    left = [word for word in words if word not in readme]
    for count in range(4):
        for chosen in combinations(sorted(texts), count):
            if all(any(word in texts[page] for page in chosen) for word in left):
                return ["README.md", *chosen]
    return []


def environment_of(folder: Path, package: Path = ROOT.parent) -> dict[str, str]:
    paths = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    modules = os.pathsep.join((str(folder / "site"), str(package)))
    environment = {**os.environ, "PATH": os.pathsep.join(paths), "PYTHONPATH": modules}
    return environment | {"EVENLOAD_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def travelled(name: str, package: Path, model: Path) -> dict[str, Any]:
    journey = JOURNEYS[name]
    with tempfile.TemporaryDirectory(prefix="evenload-journey-") as path:
        folder = Path(path)
        brought(name, folder, model)
        (folder / "recipe.yaml").write_text(TENANTS if name == "tenants" else TUNE + SMALL)
        (folder / "bin").mkdir()
        into = f"--quiet --no-deps --no-build-isolation --target {folder / 'site'}"
        for starter, words in (("evenload", '-m evenload "$@"'), ("pip", f'-m pip "$@" {into}')):
            (folder / "bin" / starter).write_text(f"#!/bin/sh\nexec {sys.executable} {words}\n")
            (folder / "bin" / starter).chmod(0o755)
        environment = environment_of(folder, package)
        began_s, cpu_s = time.monotonic(), spent_s()
        stopped = ""
        for command in journey.commands:
            done = subprocess.run(
                command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            if bool(done.returncode) != (command == journey.fails):
                stopped = next(messages(done.stderr), f"exit code {done.returncode}")
                break
        took = {"minutes": (time.monotonic() - began_s) / 60, "cpu_s": spent_s() - cpu_s}
        came_out = not stopped and journey.came_out(folder)
    pages = pages_of(package / "evenload", journey.words)
    return {
        "journey": name,
        "typed": len(journey.commands),
        **took,
        "pages": pages,
        "came_out": came_out,
        "stopped": stopped,
    }


def messages(text: str) -> Iterator[str]:
    """First lines of what evenload said before it ended."""
    lines = text.splitlines()
    for line, following in pairwise(lines):
        if line.startswith("evenload: ") and following.startswith("  "):
            yield line.removeprefix("evenload: ")


def spent_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(result: dict[str, Any]) -> Any:
    cells = {
        "journey": "{journey}",
        "typed": "{typed}",
        "minutes": "{minutes:.1f}",
        "CPU": "{cpu_s:.0f} s",
        "pages": lambda row: f"{len(row['pages'])}: {', '.join(row['pages'])}" if row["pages"] else "over 4",
        "came out": lambda row: "yes" if row["came_out"] else row["stopped"] or "no",
    }
    return columns(f"a newcomer's journeys with {result['version']}, measured", result["journeys"], cells)


def benchmark(asked: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="evenload-journeys-") as path:
        package = asked.package or Path(path)
        if not asked.package:
            (package / "evenload").symlink_to(ROOT)
        model = own_model(Path(path) / "model")
        rows = [travelled(name, package, model) for name in JOURNEYS if asked.only in name]
    return {"version": str(asked.package or "this version"), "journeys": rows}


if __name__ == "__main__":
    main(options(__doc__, only="", package=Path), benchmark, table)
