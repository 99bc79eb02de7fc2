"""What drafts by texts gain: beside none, at weights that have moved little and far, by live samples, in validations.

    python benchmarks/generation/drafts.py [--folder runs/drafts] [--steps 240] [--every 20] [--on 100] [--lr 2e-5]
                                           [--prompts 16] [--samples 8] [--tokens 192] [--repeats 2] [--ranks 2]
                                           [--json] [--out FILE]

The Collatz model of collect.py is trained for so many steps on two ranks, goes on for 100 at a learning rate of its own
(fine-tuning), and is profiled. Then all ranks draw the samples of all prompts by the weights of one step, in turns
without drafts, with texts of this generation alone, and with samples of earlier weights:

file        20 steps of fine-tuning later
far         100 steps earlier in training, when the loss was falling
validation  every 20 steps of fine-tuning, drafted by the last ones; of the second to the last
live        so many samples at once on each rank

CPU s of all ranks, the least of the repeats; wall s of the slower one. Every variant's tokens are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from evenload.benchmarks.frame import Row, begun, columns, command, machine, main, on_job, options, result_of
from evenload.benchmarks.generation import collect
from evenload.core.drafters import drafter_of
from evenload.core.recipe.generated import DraftRule
from evenload.runtime.generate.dealing import Dealer, GenerationStats
from evenload.runtime.generate.drafts import DraftCounts
from evenload.runtime.generate.request import Completion, Generation, Request, Sampling

VARIANTS = "none", "texts", "earlier"


class Counts(Dealer):
    """Spreads samples, and keeps what came of drafts."""

    drafts = DraftCounts()

    def ran(self, stats: GenerationStats) -> None:
        self.drafts = stats.drafts


def requests(folder: Path, limit: int, prompts: int, samples: int) -> list[Request]:
    rows = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    chosen = [rows[place * len(rows) // prompts] for place in range(prompts)]
    return [Request(i, tuple(row.encode()), limit, tuple(range(samples))) for i, row in enumerate(chosen)]


class Drawing:
    """Draws on all ranks, in turns of the variants."""

    def __init__(self, job: Any, asked: Any) -> None:
        self.job, self.asked = job, asked
        self.folder = Path(asked.folder)

    def load(self, step: int) -> None:
        """The weights after a step of training, or of fine-tuning."""
        kept = self.folder / ("kept" if step <= self.asked.steps else "tuned")
        self.job.host.load(kept / f"step{step:08d}" / "trainer")

    def drawn(
        self, wanted: Sequence[Request], temperature: float, variant: str, earlier: Sequence[Completion], slots: int
    ) -> tuple[tuple[Completion, ...], dict[str, float]]:
        """Samples, and what they cost."""
        drafter = None if variant == "none" else drafter_of(DraftRule(by="texts"))
        settings = Generation(1, Sampling(temperature), frozenset([10]), slots=slots, drafter=drafter)
        if variant == "earlier":
            settings = Generation(**{**vars(settings), "earlier": earlier})
        counts, begin, begin_s = Counts(), time.process_time(), time.perf_counter()
        samples = self.job.host.generate(wanted, settings, dealer=counts)
        used = self.job.gather(time.process_time() - begin, time.perf_counter() - begin_s)
        costs = {"cpu_s": float(used[:, 0].sum()), "wall_s": float(used[:, 1].max())}
        return samples, {**costs, **counts.drafts._asdict(), "tokens_a_forward": counts.drafts.tokens_a_forward}

    def turns(
        self, wanted: Sequence[Request], temperature: float, earlier: Sequence[Completion], slots: int = 64
    ) -> tuple[tuple[Completion, ...], dict[str, Row]]:
        """Every variant in turn, as often as it is asked for; the least seconds of each."""
        best: dict[str, Row] = {}
        first: tuple[Completion, ...] = ()
        for _ in range(self.asked.repeats):
            for variant in VARIANTS:
                samples, row = self.drawn(wanted, temperature, variant, earlier, slots)
                first = first or samples
                row["differ"] = sum(a.tokens != b.tokens for a, b in zip(samples, first, strict=True))
                known = best.setdefault(variant, row)
                known |= {key: min(known[key], row[key]) for key in ("cpu_s", "wall_s")}
        return first, best


def rows_of(case: str, live: int, temperature: float, samples: Sequence[Completion], best: dict[str, Row]) -> list[Row]:
    none = best["none"]
    tokens = sum(len(sample.tokens) for sample in samples)
    about = {"case": case, "live": live, "temperature": temperature, "tokens": tokens}
    rows = []
    for name, row in best.items():
        over = {f"{key}_over_none": none[f"{key}_s"] / row[f"{key}_s"] for key in ("cpu", "wall")}
        rows.append({**about, "variant": name, **row, **over})
    if os.environ["RANK"] == "0":
        print(*map(json.dumps, rows), sep="\n", file=sys.stderr, flush=True)
    return rows


def measured(job: Any, asked: Any) -> Row:
    """The rows of all cases. Collective."""
    own, steps, every, on, rows = Drawing(job, asked), asked.steps, asked.every, asked.on, []
    whole = requests(own.folder, asked.tokens, asked.prompts, asked.samples)
    live = min(64, asked.prompts * asked.samples // asked.ranks)

    def before(step: int, temperature: float) -> tuple[Completion, ...]:
        own.load(step)
        return own.drawn(whole, temperature, "none", (), 64)[0]

    last: dict[str, Any] = {"none": (), "earlier": ()}
    sums: dict[str, Row] = {}
    for step in range(steps, steps + on + 1, every):
        own.load(step)
        for variant in last:
            last[variant], row = own.drawn(whole, 1.0, variant, last[variant], 64)
            if step > steps:
                known = sums.setdefault(variant, dict.fromkeys(row, 0.0))
                known |= {key: known[key] + row[key] for key in row}
    for row in sums.values():
        row["tokens_a_forward"] = DraftCounts(*(int(row[key]) for key in DraftCounts._fields)).tokens_a_forward
    rows += rows_of("validation", live, 1.0, last["none"], sums)
    for case, first, then in (("file", steps + every, steps + 2 * every), ("far", steps - on, steps - on + every)):
        for temperature in (1.0, 0.0):
            earlier = before(first, temperature)
            own.load(then)
            rows += rows_of(case, live, temperature, *own.turns(whole, temperature, earlier))
    for count in (1, 4, 16, 64):
        samples = min(asked.samples, asked.ranks * count)
        fewer = requests(own.folder, asked.tokens, min(asked.prompts, asked.ranks * count // samples), samples)
        for case, first, then in (("live", steps, steps + every), ("live, far", steps - on, steps - on + every)):
            for temperature in (1.0, 0.0):
                own.load(first)
                earlier = own.drawn(fewer, temperature, "none", (), count)[0]
                own.load(then)
                rows += rows_of(case, count, temperature, *own.turns(fewer, temperature, earlier, count))
    return {"rows": rows}


def prepared(asked: Any) -> None:
    """Train, fine-tune and profile, unless the folder has it."""
    folder, recipe = Path(asked.folder), collect.RECIPE
    recipe |= {"parallel": {"dp": 2}, "checkpoint": {"dir": "kept", "every": asked.every, "keep": 999}}
    recipe["train"]["seed"] = 1
    collect.write(folder, asked.prompts, asked.steps)
    command("train", "recipe.yaml", folder=folder)
    if not (folder / "tuned").exists():
        shutil.copytree(folder / "kept", folder / "tuned")
    words = (
        "checkpoint.dir=tuned",
        f"train.steps={asked.steps + asked.on}",
        f"train.lr={asked.lr}",
        "train.lr_schedule=constant",
    )
    command("train", "recipe.yaml", *words, folder=folder)
    if not (folder / "costs.yaml").exists():
        command("profile", "recipe.yaml", "--out", "costs.yaml", folder=folder)
    data = {**recipe["data"], "source": str((folder / "paths.jsonl").resolve())}
    drawn = {**recipe, "parallel": {"dp": asked.ranks}, "data": data, "costs": str((folder / "costs.yaml").resolve())}
    (folder / "drawn.yaml").write_text(yaml.safe_dump(drawn))


def benchmark(asked: Any) -> Row:
    prepared(asked)
    result = result_of(begun(__file__, sys.argv[1:], asked.ranks))
    return {**result, "machine": machine(), "settings": {key: str(value) for key, value in vars(asked).items()}}


def on_rank(asked: Any) -> None:
    on_job(str(asked.folder / "drawn.yaml"), [], lambda job: measured(job, asked))


def table(result: Row) -> Any:
    cells = {
        "case": "{case}",
        "live": "{live}",
        "temperature": "{temperature:g}",
        "drafts": "{variant}",
        "tokens": "{tokens:,}",
        "CPU s": "{cpu_s:.2f}",
        "CPU over none": "{cpu_over_none:.2f}x",
        "wall over none": "{wall_over_none:.2f}x",
        "tokens a forward": "{tokens_a_forward:.2f}",
        "drafted": "{drafted:,.0f}",
        "accepted": "{accepted:,.0f}",
    }
    return columns("drafts by texts, measured", result["rows"], cells, result["machine"])


def arguments() -> Any:
    sizes = {
        "steps": 240,
        "every": 20,
        "on": 100,
        "lr": 2e-5,
        "prompts": 16,
        "samples": 8,
        "tokens": 192,
        "repeats": 2,
        "ranks": 2,
    }
    return options(__doc__, folder=Path("runs/drafts"), **sizes)


if __name__ == "__main__":
    main(arguments(), benchmark, table, on_rank)
