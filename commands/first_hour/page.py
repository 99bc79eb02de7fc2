"""The page of the first hour, as Markdown: the card, how each part ended, and what it measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import SHOWN, shorten

Result = dict[str, Any]


def page(result: Result) -> str:
    """All that is known so far."""
    rows = result["parts"]
    about = rows.get("devices", {}).get("result", {})
    title = about["gpus"][0]["name"] if about.get("gpus") else "a GPU"
    head = ("part", "ended", "seconds", "command")
    ends = [(name, _end(row), f"{row['wall_s']:.0f}", f"`{row['command']}`") for name, row in rows.items()]
    sections = [show(rows[name]["result"]) for name, show in _SECTIONS.items() if "result" in rows.get(name, {})]
    costs = Path(result["out"]) / "costs.yaml"
    if rows.get("profile", {}).get("exit_code") == 0 and costs.is_file():
        sections.append(f"## Costs\n\n```yaml\n{costs.read_text()}```\n")
    failed = [f"## {name}\n\n```text\n{row['stderr']}\n```\n" for name, row in rows.items() if "stderr" in row]
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "cuda", "nccl", "driver") if about.get(name))
    intro = f"evenload {result['evenload']}, {versions}. Please send this page and `result.json`, next to it."
    return "\n".join([f"# The first hour of evenload on {title}\n", intro, "", _table(head, ends), *sections, *failed])


def _end(row: Result) -> str:
    return "out of time" if row["timed_out"] else "well" if row["exit_code"] == 0 else f"exit code {row['exit_code']}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[shorten(str(cell), SHOWN).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _devices(about: Result) -> str:
    gpus = [(n, one["name"], one["capability"], one["memory_bytes"] >> 20) for n, one in enumerate(about["gpus"])]
    links = [(row["from"], row["to"], row["how"], _rate(row["bytes_per_s"])) for row in about["links"]]
    of_gpus = _table(("GPU", "name", "capability", "MiB"), gpus)
    return f"## GPUs\n\n{of_gpus}\n{_table(('from', 'to', 'how', 'GB/s'), links)}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g}"


def _installed(result: Result) -> str:
    rows = [(row["name"], row["found"], row["supports"], row["status"]) for row in result["hosts"]]
    return f"## Installed\n\n{_table(('', 'version', 'supported', 'status'), rows)}"


def _kernels(result: Result) -> str:
    ran, others = [], {}
    for row in result["rows"]:
        about = (row["kernel"], row["case"], f"{row['dtype']}, {row['head_dim']}")
        if "error" in row:
            ran.append((*about, f"{row['error']:.1e}", f"{row['bound']:.1e}", row["status"]))
        elif row["status"] == "failed":
            ran.append((*about, row["why"], "", "failed"))
        else:
            others[row["kernel"], row["status"]] = f"{row['kernel']}: {row['status']}"
    head = ("kernel", "case", "dtype, head dimension", "largest error", "allowed", "")
    return f"## Kernels against float64\n\n{_table(head, ran)}\n{'; '.join(others.values())}\n"


def _verify(result: Result) -> str:
    keys = ("exact", "loss_rel_err", "grad_rel_err", "tolerance", "update_rel_err", "over")
    return f"## Against plain training, float32\n\n{_table(('', ''), [(key, result[key]) for key in keys])}"


def _train(result: Result) -> str:
    head = ("", "tokens/s", "last loss", "imbalance", "step, s")
    keys = ("tokens_per_s", "loss", "imbalance", "step_s")
    rows = [(name, *(f"{one[key]:.5g}" for key in keys)) for name, one in result["variants"].items()]
    beside = result["comparison"]["stock"]["loss_rel_diff"]
    losses = ", ".join(f"{row['loss']:.4f}" for row in result["steps"])
    host = ", ".join(f"{key} {value}" for key, value in result["host"].items())
    return (
        f"## Against stock, bf16\n\n{_table(head, rows)}\n"
        f"Losses of evenload's steps: {losses}; stock's differ by at most {beside:.1e}. {host}\n"
    )


def _profile(result: Result) -> str:
    rows = [
        (link, one["collective"], one["num_ranks"], f"{one['num_bytes']:.0f}", f"{1e6 * one['seconds']:.1f}")
        for link, fit in result["links"].items()
        for one in fit["timings"]
    ]
    errors = ", ".join(f"{name} {error:.1%}" for name, error in result["fit_error"].items())
    links = (
        _table(("link", "collective", "ranks", "bytes", "us"), rows) if rows else "One GPU: no link between ranks.\n"
    )
    return f"## Profile\n\nErrors of the fit: {errors}; the machine was busy: {result['busy']}\n\n{links}"


_SECTIONS: dict[str, Callable[[Result], str]] = {
    "devices": _devices,
    "installed": _installed,
    "kernels": _kernels,
    "verify": _verify,
    "train": _train,
    "profile": _profile,
}
