"""What a Hugging Face model's call is given: a pack as its arguments, and what it passes over."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import create_causal_mask

from ...core.errors import EvenloadError
from ...runtime.attention.pack import Pack
from .attention import PACK
from .refusals import KEYS


def inputs_of(pack: Pack, *, with_mask: bool) -> dict[str, Any]:
    """Tensors [1, T] and the pack itself.

    ``labels`` stand where their token does, as in a row of a script's own; ``shift_labels`` are what the model would
    make of them, and reach over the end of a slice. ``with_mask``: an ``attention_mask`` too, which scripts count by;
    attention goes by the pack.
    """
    mask = {"attention_mask": (pack.sequence_ids_T >= 0).long()[None]} if with_mask else {}
    return {
        "input_ids": pack.tokens_T[None],
        "labels": torch.cat([pack.labels_T[-1:], pack.labels_T[:-1]])[None],
        "shift_labels": pack.labels_T[None],
        "position_ids": pack.positions_T[None],
        "use_cache": False,
        PACK: pack,
        **mask,
    }


class OfPack:
    """Stands for what a planned forward gives besides its loss; raises EvenloadError where it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    def __getitem__(self, index: Any) -> Any:
        return self._refuse()

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return cls._refuse()

    @staticmethod
    def _refuse() -> Any:
        raise EvenloadError(
            "a planned forward gives its loss alone: logits are those of a pack, not of the loop's rows",
            "another output of the model's call is used",
            "compute figures of a batch by a call of their own: with torch.no_grad(): model(**batch), which is not "
            "planned; where the loss needs logits, leave evenload off",
        )


def without_unread(batch: Mapping[str, Any], model: torch.nn.Module, *others: type) -> dict[str, Any]:
    """A batch without what nobody reads: entries whose name stands nowhere in the code of the model and of `others`,
    and that go through the model's ``**kwargs`` to no effect."""
    extra = [key for key in batch if key not in KEYS]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(model).forward).parameters.values())
    if not extra or not takes_any:
        return dict(batch)
    classes = {base for module in model.modules() for base in type(module).__mro__}
    sources: set[Any] = {base if base.__module__ == "__main__" else base.__module__ for base in classes}
    sources |= {one.__module__ for one in (ForCausalLMLoss, create_causal_mask)}
    sources |= {name for name in sys.modules if name.startswith("transformers.") and "attention" in name}
    sources |= {base for one in others for base in one.__mro__ if base is not object}
    sources = {one for one in sources if isinstance(one, type) or one.split(".")[0] not in ("torch", "builtins")}
    return {key: value for key, value in batch.items() if key not in extra or any(_reads(one, key) for one in sources)}


def _reads(source: Any, word: str) -> bool:
    """Whether code may read an argument of this name; code that cannot be looked at may."""
    words = _words(source)
    return words is None or word in words


@cache
def _words(source: Any) -> frozenset[str] | None:
    """Names and texts in the code of a class, or of a module by its name; None where there is none to look at."""
    try:
        tree = ast.parse(inspect.getsource(source if isinstance(source, type) else sys.modules[source]).lstrip())
    except (OSError, KeyError, SyntaxError, TypeError):
        return None
    kinds = {ast.arg: "arg", ast.keyword: "arg", ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}
    words = (getattr(node, kinds[type(node)]) for node in ast.walk(tree) if type(node) in kinds)
    return frozenset(word for word in words if isinstance(word, str))
