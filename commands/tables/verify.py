"""What `verify` compared, and the branches that it proved."""

from __future__ import annotations

import math

from rich.console import Group

from .show import MOST_FAULTS, Columns, Result, by_columns, column, grid, machine


def _error(value: float) -> str:
    return f"{value:.2e}" if math.isfinite(value) else "not finite"


_PROVED: Columns = {
    "tenant": column("name"),
    "rank": column("r"),
    "steps": column("steps"),
    "loss": column("loss_rel_err", _error),
    "gradients": column("grad_rel_err", _error),
    "after updates": column("update_rel_err", _error),
    "verdict": column("exact", lambda exact: "exact" if exact else "NOT exact"),
}


def table(result: Result) -> Group:
    """What was compared and by how much it was off, then the branches that the steps took."""
    resumed = result["resumed"]
    layout = "on tp {tp}, pp {pp}, dp {dp}, after {at_step} steps".format(**resumed) if resumed else "not verified"
    faults = [*result["planners_failed"], *result["over"], *(f"not finite: {name}" for name in result["not_finite"])]
    rows = [
        ("loss, relative error", _error(result["loss_rel_err"])),
        ("gradients, relative error of the worst parameter", _error(result["grad_rel_err"])),
        ("  that parameter, and what is allowed", f"{result['worst_parameter']}  {result['tolerance']:.1e}"),
        ("norm of the gradient, relative error", _error(result["norm_rel_err"])),
        ("weights and moments after updates, relative error", _error(result["update_rel_err"])),
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
    untaken = "no step has taken it" if "tenants" in result else "no batch of these data takes it"
    branches += [(name, untaken) for name in result["branches_not_taken"]]
    tenants = [by_columns("each tenant beside itself alone", _PROVED, result["tenants"])] if "tenants" in result else []
    return Group(
        grid(f"evenload against plain training on {machine(result)}", ("", ""), rows, caption),
        *tenants,
        grid("branches of the runtime that were proved", ("branch", "times"), branches, ""),
    )
