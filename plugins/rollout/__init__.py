"""Rollout: which rank generates which samples, in which order, and which samples are kept (TIE, SART).

Pure functions for any engine; no key of a recipe asks for them, so nothing is registered.
"""

if __name__ != "evenload.plugins.rollout":
    raise ImportError(f"{__name__}: import this package as evenload.plugins.rollout")

from .collect import Collect, Collected, Prune, ended_by, kept_beside_all, samples_for
from .costs import H100_7B, RolloutCosts, fit_costs
from .deal import plan_rollout, tie_plan
from .lengths import LengthDistributions, SampledLengths, fit_lengths
from .moves import levelled, move, steps_of
from .plan import RolloutPlan, RolloutRequest, bound_of, check_rollout, spread
from .play import InOrder, Rollout
from .score import Expected, TieQueue, expected

__all__ = [
    "H100_7B",
    "Collect",
    "Collected",
    "Expected",
    "InOrder",
    "LengthDistributions",
    "Prune",
    "Rollout",
    "RolloutCosts",
    "RolloutPlan",
    "RolloutRequest",
    "SampledLengths",
    "TieQueue",
    "bound_of",
    "check_rollout",
    "ended_by",
    "expected",
    "fit_costs",
    "fit_lengths",
    "kept_beside_all",
    "levelled",
    "move",
    "plan_rollout",
    "samples_for",
    "spread",
    "steps_of",
    "tie_plan",
]
