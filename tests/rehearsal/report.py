"""The table of the rehearsal: each recipe's ops, faults, waits and copies to the device a step, of its first rank.

    python tests/rehearsal/report.py [CASE ...]

A wait is where the host stands still until the device has come so far; "ours" are evenload's own lines, "host's" the
trainer's. Copies are those from the host to the device; all of ours run beside. Behind it, of scripts that somebody
else wrote, copies to the device a step, stock and with evenload: such a loop moves its own batches in both.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from evenload.api import load_recipe
from harness.forge import Forge

from rehearsal import seen as seeing

TESTS = Path(__file__).parents[1]
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_allow_untested_optimizer": True,
}  # fmt: skip
SCRIPTS = {
    "megatron": ("megatron_script.py", "--out . --dtypes bf16", 3),
    "deepspeed": ("deepspeed_script.py", "--out . --stages 1 --ds-config ds.json", 3),
    "huggingface": ("trainer_script.py", "out", 2),
}
"""By trainer: a script, its arguments and steps."""


def main() -> None:
    spec = importlib.util.spec_from_file_location("rehearsal.test_recipes", Path(__file__).with_name("test_recipes.py"))
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    table = Table("case", "ops", "faults", "waits a step, ours", "host's", "copies to the device a step", "KiB", "s")
    forges: dict[str, Forge] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in sys.argv[1:] or cases.CASES:
            path = cases.RECIPES / f"{case.partition(',')[0]}.yaml"
            recipe = load_recipe(path, cases.CASES[case])
            place = Path(tempfile.mkdtemp(dir=folder))
            if recipe.trainer not in forges:
                forges[recipe.trainer] = Forge(f"cuda+{recipe.trainer}", place)
            start = time.monotonic()
            words = ("train", str(path), *cases.words_of(case, place))
            done = forges[recipe.trainer].run(place, words, recipe.min_world_size)
            seconds, steps = time.monotonic() - start, cases.STEPS_OF.get(case, cases.STEPS)
            seen = seeing.seen_in(done.outputs)
            first = json.loads(min(done.outputs.glob("rank.*.json")).read_text())
            own = sum(seen.waits_of_ours(steps, *cases.SETUP)[0].values())
            in_steps = (n for what, n in seen.waits[0].items() if not any(place in what for place in cases.SETUP))
            every = sum(n / steps for n in in_steps if n >= steps)
            beside = Counter({k: n for k, n in seen.to_device[0].items() if k.startswith("runs beside")})
            moved = sum(n for what, n in first["bytes_to_device"].items() if "copy_rows" in what)
            table.add_row(
                case,
                f"{first['ops']['on the device']:,}",
                str(sum(seen.faults.values())),
                f"{own:.1f}",
                f"{every - own:.1f}",
                f"{sum(beside.values()) / steps:.1f}",
                f"{moved / steps / 1024:.0f}",
                f"{seconds:.0f}",
            )
        Console(width=120).print(table)
        if not sys.argv[1:]:
            Console(width=120).print(of_scripts(Path(folder)))
        for forge in forges.values():
            forge.close()


def of_scripts(folder: Path) -> Table:
    """Each of SCRIPTS stock, then planned, on two ranks."""
    table = Table("script", "", "blocking copies a step", "beside", "KiB")
    for trainer, (name, words, steps) in SCRIPTS.items():
        text = (TESTS / "scripts" / name).read_text().replace("    use_cpu=True,\n", "    bf16=True,\n")
        (folder / name).write_text(text)
        (folder / "ds.json").write_text(json.dumps(DS_CONFIG))
        kind = "deepspeed" if trainer == "deepspeed" else "transformers"
        kind = "megatron" if trainer == "megatron" else kind
        (folder / "on.yaml").write_text(f"trainer: {kind}\nplugins: {{packing: {{enabled: true, max_tokens: 160}}}}\n")
        forge = Forge(f"cuda+{trainer}", Path(tempfile.mkdtemp(dir=folder)))
        for how in ("", f"import evenload; evenload.enable({str(folder / 'on.yaml')!r})"):
            done = forge.run(folder, tuple(words.split()), 2, how, folder / name)
            assert done.returncode == 0, done.stderr[-2000:]
            first = json.loads(min(done.outputs.glob("rank.*.json")).read_text())
            copies = {what: n for what, n in first["to_device"].items() if n >= steps and "modeling_utils" not in what}
            lines = {what.partition(" at ")[2] for what in copies}
            moved = sum(n for line, n in first["bytes_to_device"].items() if line in lines)
            by_kind = [sum(n for what, n in copies.items() if what.startswith(kind)) for kind in ("waits", "runs")]
            counts = [f"{n / steps:.1f}" for n in by_kind]
            table.add_row(name, "planned" if how else "stock", *counts, f"{moved / steps / 1024:.1f}")
        forge.close()
    return table


if __name__ == "__main__":
    main()
