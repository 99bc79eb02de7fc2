"""What `verify` compared, and the branches that it proved."""

from __future__ import annotations

from rich.console import Group

from .show import MOST_FAULTS, Columns, Result, by_columns, column, error, grid, machine, of_plugins

_ARRANGED: Columns = {
    "arrangement": column("name"),
    "slots": column("slots"),
    "cache, tokens": column("cache_tokens"),
    "forwards": column("forwards"),
    "tokens computed again": column("tokens_again"),
    "samples that differ": column("samples_wrong"),
    "missing": column("samples_missing"),
    "repeated": column("samples_repeated"),
    "ties turned": column("flips"),
    "log-probabilities": column("log_prob_err", error),
}


def _of_generation(result: Result) -> Group:
    """Each arrangement against plain generation, then what all of them say."""
    faults, ended = result["over"], ", ".join(f"{how} {count}" for how, count in result["ended"].items())
    before = [row["samples_before"] for row in result["arrangements"] if row["samples_before"]]
    rows = [
        ("samples of plain generation, how they ended", f"{result['samples']}: {ended}"),
        ("samples that were there at the interruption", before[0] if before else 0),
        ("log-probabilities, largest difference to plain generation", error(result["log_prob_err"])),
        ("  to a planned training forward of the same texts", error(result["training_log_prob_err"])),
        ("  what is allowed", f"{result['allowed']:.1e}"),
        *([("tenants", ", ".join(result["tenants"]))] if "tenants" in result else []),
        *(("beyond what is allowed" if not place else "", fault) for place, fault in enumerate(faults[:MOST_FAULTS])),
        ("verdict", "exact" if result["exact"] else "NOT exact"),
    ]
    title = f"evenload against plain generation, one by one, on {machine(result)}"
    caption = f"{result['prompts']} prompts, {result['samples']} samples, {result['tokens']:,} tokens each time"
    spare = ("cache, tokens", "forwards", "repeated", "missing")
    return Group(
        by_columns(title, _ARRANGED, result["arrangements"], caption, spare=spare),
        grid("what was compared", ("", ""), rows),
    )


def table(result: Result) -> Group:
    """What was compared and by how much it was off, then the branches that the steps took; or the samples."""
    if "arrangements" in result:
        return _of_generation(result)
    resumed = result["resumed"]
    layout = "on tp {tp}, pp {pp}, dp {dp}, after {at_step} steps".format(**resumed) if resumed else "not verified"
    faults = [*result["planners_failed"], *result["over"], *(f"not finite: {name}" for name in result["not_finite"])]
    rows = [
        ("loss, relative error", error(result["loss_rel_err"])),
        ("gradients, relative error of the worst parameter", error(result["grad_rel_err"])),
        ("  that parameter, and what is allowed", f"{result['worst_parameter']}  {result['tolerance']:.1e}"),
        ("norm of the gradient, relative error", error(result["norm_rel_err"])),
        ("weights and moments after updates, relative error", error(result["update_rel_err"])),
        ("resumed", layout),
        ("samples that are not those of an undisturbed run", result["samples_wrong"]),
        ("tokens missing, repeated", f"{result['tokens_missing']}, {result['tokens_repeated']}"),
        *(("beyond what is allowed" if not place else "", fault) for place, fault in enumerate(faults[:MOST_FAULTS])),
        *((f"not exercised: plugins.{name}", lacking) for name, lacking in result["not_exercised"].items()),
        ("verdict", "exact" if result["exact"] else "NOT exact"),
    ]
    more = result["batches"] - result["steps"]
    caption = f"{result['steps']} steps" + (f" and {more} batches for further branches" if more else "")
    caption += f", {result['tokens']:,} tokens, {result['targets']:,} of them targets, planned by {result['planner']}"
    branches = [(name, str(count)) for name, count in result["branches"].items()]
    own = of_plugins("verify", result)
    untaken = "no step has taken it" if own else "no batch of these data takes it"
    branches += [(name, untaken) for name in result["branches_not_taken"]]
    return Group(
        grid(f"evenload against plain training on {machine(result)}", ("", ""), rows, caption),
        *own,
        grid("branches of the runtime that were proved", ("branch", "times"), branches, ""),
    )
