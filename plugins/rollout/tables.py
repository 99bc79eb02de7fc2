"""What `generate` has written."""

from __future__ import annotations

from rich.table import Table

from ...commands.tables.scorers import lines_of
from ...commands.tables.show import Result, grid
from ...core.input.format import percent, seconds


def table(result: Result) -> Table:
    numbers = {"prompts": result["prompts"], "samples": result["samples"], "made before": result["samples_before"]}
    numbers |= {f"ended by {how}": number for how, number in sorted(result["ended"].items())}
    numbers |= _collected(result["collected"]) if result["collected"] else {}
    rows = [*numbers.items(), ("new tokens", result["tokens"]), ("time", seconds(result["seconds"]))]
    rows += [*_dealing(result["dealing"]), *lines_of(result["scorers"] or {})]
    if drafts := result["drafts"]:
        counts = f"{drafts['tokens_a_forward']:.2f}, {drafts['drafted']:,}, {drafts['accepted']:,}"
        rows.append(("tokens of a sample in a forward, drafted, accepted", counts))
    if "approximate" in result:
        rows.insert(0, ("approximate, not the model's own samples", result["approximate"]))
    return grid(result["out"], ("of this run", "number"), rows, f"run {result['run']}")


def _dealing(dealt: Result) -> list[tuple[str, str]]:
    """How samples were dealt to ranks, and how far that stayed from a bound."""
    if not dealt:
        return []
    moves = f", again at {dealt['borders']} borders: {dealt['moved']} samples moved" if dealt["borders"] else ""
    most, least = max(dealt["forwards"]), dealt["least_forwards"]
    rows = [("dealt by", f"{dealt['dealt']}{moves}"), ("decode steps of the busiest rank, bound", f"{most}, {least}")]
    if "bound_s" in dealt:
        over = percent(dealt["predicted_s"] / dealt["bound_s"] - 1)
        predicted, bound = seconds(dealt["predicted_s"]), seconds(dealt["bound_s"])
        return [*rows, ("predicted by the costs of decode steps, bound", f"{predicted}, {bound}: {over} over")]
    return [*rows, ("bound in seconds", "costs of decode steps are not known: evenload profile")]


def _collected(row: Result) -> Result:
    """What is kept of the samples that this command has drawn, next to all of them."""
    lines: Result = {
        "drawn now, pruned, left": f"{row['kept'] + row['pruned'] + row['left']}, {row['pruned']}, {row['left']}",
        "tokens of one, kept and all (estimated)": f"{row['kept_tokens']:.1f}, {row['mean_tokens']:.1f}",
        "tokens drawn, of all samples (estimated)": f"{row['tokens']:,}, {row['tokens_of_all']:,.0f}",
    }
    if row["kept_score"] is not None:
        lines["score, kept and all (last ones)"] = f"{row['kept_score']:.3f}, {row['mean_score']:.3f}"
    return lines
