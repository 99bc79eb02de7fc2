"""Another name of harness.proof.drawn, for those that load this file by its path."""

from harness.proof.drawn import random_plan, regrouped, with_order

__all__ = ["random_plan", "regrouped", "with_order"]
