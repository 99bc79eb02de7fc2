"""Tenants of a plan in rows and sentences."""

from __future__ import annotations

from typing import Any

from ...core.input.format import percent, seconds

HEAD = ("tenant", "samples", "tokens", "share of the step", "alone", "adapter")


def said(tenants: dict[str, Any]) -> list[str]:
    """What a shared plan saves, in sentences."""
    together_s, alone_s = tenants["together_s"], tenants["one_after_another_s"]
    lines = [
        f"together {seconds(together_s)}, one after another {seconds(alone_s)} on the same ranks, each planned as well:"
        f" {tenants['saving']:.2f}x"
    ]
    if tenants["saving_at_most"] is not None:
        most = f"{tenants['saving_at_most']:.2f}x at most"
        lines.append(f"the certified bound of all together is {seconds(tenants['bound_s'])}: {most}")
    return lines


def rows(tenants: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            row["name"],
            f"{row['samples']:.4g}",
            f"{row['tokens']:,.0f}",
            percent(row["share"]),
            seconds(row["alone_s"]),
            f"{row['adapter_weights']:,} weights",
        )
        for row in tenants["tenants"]
    ]
