"""Verdicts: which of two files of samples is better, by a judge whose biases are taken out? `evenload compare`.

Pure numpy: neither torch nor ranks. ``grounded_prompts`` writes prompts from a graph to compare models on.
"""

from ...core import verbs
from .grounded import grounded_prompts

__all__ = ["grounded_prompts"]

verbs.register(verbs.Verb("compare", "evenload.plugins.verdicts.verb:compare", order=85))
