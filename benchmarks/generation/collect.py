"""Votes of all samples, of those that end first, and of those that also score well: SART in `evenload generate`.

    python benchmarks/generation/collect.py [--folder runs/collect] [--steps 600] [--prompts 96] [--quick] [--json]
                                            [--out FILE]

A model of 1.1 million parameters is trained on Collatz paths of the numbers below 200 as text ("7: 22 11 34 ... 1"),
with `evenload train`, unless the folder has it. `evenload generate` then continues "7:" and its like under each rule,
at temperature 1, on one rank. A sample's answer is how many steps its path has; most of the kept ones win, and equally
many share. The score of an unfinished path, by which samples are pruned, is the share of its steps that are lawful.

tokens    that were drawn, of all samples, those that ended early among them
work      tokens of all of as many samples as are about as often right, over the tokens of the rule
CPU s     of the command, which loads the model, too
"""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from evenload.benchmarks.frame import columns, command, main, options

RECIPE: dict[str, Any] = {
    "trainer": "megatron",
    "model": {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256},
    "data": {"source": "paths.jsonl", "max_length": 640, "long_samples": "drop"},
    "parallel": {"dp": 1},
    "train": {"steps": 600, "global_batch_size": 32, "lr": 2e-3, "lr_schedule": "cosine", "warmup_steps": 20},
    "checkpoint": {"dir": "kept", "every": 10**6},
    "generate": {"max_new_tokens": 512, "end_tokens": [10], "slots": 64},
    "plugins": {"packing": {"enabled": True, "max_tokens": 8192}},
}
PROCESS = '''
"""The share of the steps of an unfinished path that are lawful."""


def lawful(prompt, text, row):
    words = [prompt.rstrip(":"), *text.split()[:-1]]
    numbers = [int(word) if word.isascii() and word.isdigit() else -1 for word in words]
    steps = [b == (a // 2 if a % 2 == 0 else 3 * a + 1) for a, b in zip(numbers, numbers[1:])]
    return sum(steps) / len(steps) if steps else 1.0
'''
PRUNE = {"score": "process:lawful", "below": 0.9, "most": 8}
Rule = dict[str, Any] | None


def path_of(number: int) -> list[int]:
    path = []
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        path.append(number)
    return path


def write(folder: Path, prompts: int, steps: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"text": f"{number}: {' '.join(map(str, path_of(number)))}\n"} for number in range(2, 200)]
    (folder / "paths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = [2 + place * 197 // max(1, prompts - 1) for place in range(prompts)]
    asked = [{"prompt": f"{number}:", "answer": len(path_of(number))} for number in numbers]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (folder / "process.py").write_text(PROCESS)
    RECIPE["train"]["steps"] = steps
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))


def run(folder: Path, *words: str) -> tuple[dict[str, Any], float]:
    """What a command of evenload prints as JSON, and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = command(*words, folder=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rules(quick: bool) -> dict[str, tuple[int, Rule]]:
    """Samples of a prompt, and what is kept of them, by name."""
    if quick:
        return {"all of 2": (2, None), "1 of 2": (2, {"keep": 1, "of": 2})}
    named: dict[str, tuple[int, Rule]] = {f"all of {of}": (of, None) for of in (1, 4, 8, 16)}
    for keep, of in ((2, 4), (4, 8), (6, 8), (4, 16), (8, 16), (12, 16)):
        named[f"{keep} of {of}"] = of, {"keep": keep, "of": of}
    for keep, of in ((1, 4), (2, 4), (1, 8), (2, 8), (4, 8), (2, 16), (4, 16)):
        named[f"{keep} of {of}, pruned"] = of, {"keep": keep, "of": of, "every": 32, "prune": PRUNE}
    return named


def vote(folder: Path, out: str) -> tuple[float, float]:
    """The share of prompts whose majority is right, and the mean tokens of a sample that votes."""
    answers = [json.loads(line)["answer"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    votes: list[Counter[int]] = [Counter() for _ in answers]
    lengths = []
    for line in (folder / out).read_text().splitlines():
        row = json.loads(line)
        votes[row["prompt"]][len(row["text"].split())] += 1
        lengths.append(len(row["tokens"]))
    right = 0.0
    for own, answer in zip(votes, answers, strict=True):
        winners = [one for one, count in own.items() if count == max(own.values())]
        right += (answer in winners) / len(winners)
    return right / len(answers), sum(lengths) / len(lengths)


def measured(folder: Path, quick: bool) -> list[dict[str, Any]]:
    rows = []
    for name, (of, rule) in rules(quick).items():
        out = f"{name.replace(' ', '_').replace(',', '')}.jsonl"
        (folder / out).unlink(missing_ok=True)
        word = f"generate.collect={json.dumps(rule)}"
        result, cpu_s = run(
            folder, "generate", "recipe.yaml", word, "--prompts", "prompts.jsonl", "--out", out, "--samples", str(of),
            "--checkpoint", "kept",
        )  # fmt: skip
        right, kept_tokens = vote(folder, out)
        rows.append({"rule": name, "right": right, "tokens": result["tokens"], "kept_tokens": kept_tokens})
        rows[-1] |= {"cpu_s": cpu_s, "collected": result["collected"]}
        print(name, rows[-1]["right"], rows[-1]["tokens"], f"{cpu_s:.0f} s", file=sys.stderr)
    return rows


def table(result: dict[str, Any]) -> Any:
    cells = {
        "rule": "{rule}",
        "right": "{right:percent}",
        "tokens": "{tokens:,}",
        "work over all of as many": lambda row: "" if row["work"] is None else f"{row['work']:.2f}x {row['beside']}",
        "tokens of one that votes": "{kept_tokens:.0f}",
        "score kept / all": lambda row: _scores(row["collected"]),
        "CPU s": "{cpu_s:.0f}",
    }
    return columns("samples that are kept, measured", result["rows"], cells, f"{result['prompts']} prompts")


def _scores(collected: dict[str, Any] | None) -> str:
    if not collected or collected["kept_score"] is None:
        return ""
    return f"{collected['kept_score']:.3f} / {collected['mean_score']:.3f}"


def compare(rows: list[dict[str, Any]]) -> None:
    """Of each rule the least work of all samples that are as often right, to half a point, over its own."""
    whole = sorted((row["tokens"], row["right"], row["rule"]) for row in rows if row["collected"] is None)
    for row in rows:
        able = [(tokens, name) for tokens, right, name in whole if right >= row["right"] - 0.005]
        tells = row["collected"] is not None and bool(able)
        row["work"] = able[0][0] / row["tokens"] if tells else None
        row["beside"] = able[0][1] if tells else None


def benchmark(asked: Any) -> dict[str, Any]:
    prompts, steps = (3, 2) if asked.quick else (asked.prompts, asked.steps)
    write(asked.folder, prompts, steps)
    trained, train_s = run(asked.folder, "train", "recipe.yaml")
    losses = [row["loss"] for row in trained["steps"]]
    rows = measured(asked.folder, asked.quick)
    compare(rows)
    return {"prompts": prompts, "loss": losses[-1] if losses else None, "train_s": train_s, "rows": rows}


def arguments() -> Any:
    return options(__doc__, folder=Path("runs/collect"), steps=600, prompts=96, quick=False)


if __name__ == "__main__":
    main(arguments(), benchmark, table)
