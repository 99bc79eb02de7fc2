"""Rollout: which rank generates which samples, in which order, and which samples are kept (TIE, SART).

Pure functions for any engine, and the verb `generate`, which deals by them.
"""

from ...core import verbs
from ...core.dealers import DEALERS
from ...core.drafters import DRAFTERS, DrafterRow
from ...core.function_rows import FunctionRow
from .cascades import CascadePlan, allot, plan_cascade
from .collect import Collect, Collected, Prune, ended_by, kept_beside_all, samples_for
from .costs import H100_7B, RolloutCosts
from .deal import plan_rollout, tie_plan
from .lengths import LengthDistributions, SampledLengths, fit_lengths
from .moves import levelled, move, steps_of
from .plan import RolloutPlan, RolloutRequest, bound_of, check_rollout, spread
from .play import InOrder, Rollout
from .score import Expected, TieQueue, expected

__all__ = [
    "H100_7B",
    "CascadePlan",
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
    "allot",
    "bound_of",
    "check_rollout",
    "ended_by",
    "expected",
    "fit_lengths",
    "kept_beside_all",
    "levelled",
    "move",
    "plan_cascade",
    "plan_rollout",
    "samples_for",
    "spread",
    "steps_of",
    "tie_plan",
]

DEALERS.register(FunctionRow("by_length", "evenload.plugins.rollout.dealer:by_length"))
DRAFTERS.register(DrafterRow("texts", "evenload.plugins.rollout.texts:drafter"))
_QUANTIZED = "evenload.plugins.rollout.quantized"
DRAFTERS.register(DrafterRow("quantized", f"{_QUANTIZED}:drafter", unfit=f"{_QUANTIZED}:unfit"))
verbs.register(verbs.Verb("generate", "evenload.plugins.rollout.verb:generate", order=80))
