"""What ranks do for the verbs of the host, a module each: a recipe and plain arguments in, the result out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankWork:
    """What the ranks of a verb do; its functions are ``module:function``, for a launcher needs no torch."""

    verb: str
    function: str
    """Each rank calls it with the recipe, its ``progress`` and the arguments of the verb."""
    refuse: str = ""
    """Called with the recipe and the arguments before anything starts; raises EvenloadError for what cannot be
    honoured."""
    needs_data: bool = True
    """It works on the recipe's data, which are looked at before ranks start."""


TRAIN = RankWork("train", f"{__name__}.train:train")
VERIFY = RankWork("verify", f"{__name__}.verify:verify", refuse="evenload.training.proof.prompting:refuse_proof")
BENCH = RankWork("bench", f"{__name__}.bench:bench")
PROFILE = RankWork("profile", f"{__name__}.profile:profile")
EXPORT = RankWork("export", f"{__name__}.export:export", needs_data=False)
