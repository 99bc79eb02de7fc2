"""The form of plan.json: how plans are written, and how a file that came from anywhere is read back.

    {"format": 1, "caps": {"packing": {"max_tokens": 8192}}, "steps": [{"lengths": ..., "micro_batches": ..., ...}]}

``caps`` are those that the recipe asked for; ``limits`` of a step are those under which its plan was checked, so that
anybody can compare the two. ``digest`` is what ranks compare of a plan, ``checksum`` is that of all that a step says.
Files without caps, limits and checksum are read as well, under limits that the caller knows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, create_model

from .errors import EvenloadError, PlanError, shorten
from .input import reading
from .input.bounds import AMOUNT, LAYERS, RANKS, SEQUENCES, TOKENS
from .input.validation import described
from .laws import check
from .plan.expert_policy import EXPERTS_AT_HOME, ExpertPolicy
from .plan.limits import NOT_OF_ALL_LAYERS, Limits, MemoryCost
from .plan.step_plan import CpComm, MicroBatch, Op, PassKind, Slice, StepPlan, as_lengths

_DO = "write the plan again with `evenload plan --out`"

Whole = Annotated[int, Field(strict=True, ge=0, le=TOKENS)]
Rank = Annotated[int, Field(strict=True, ge=0, lt=RANKS)]
Layers = Annotated[int, Field(strict=True, ge=1, le=LAYERS)]
Amount = Annotated[float, Field(strict=True, ge=0, le=AMOUNT)]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _MicroBatch(_Form):
    slices: list[tuple[Whole, Whole, Whole]]
    ranks: list[Rank]
    pad_to: Whole = 0
    engine: CpComm = ""
    inner: Rank = 0
    homes: list[list[Rank]] = []
    remap: StrictBool = False
    routed: StrictBool = False
    round_to: Whole = 0


_KEY_OF = {"cp_comm": "engine", "ulysses_degree": "inner", "cp_groups": "homes"}
"""Keys of a micro-batch in plan.json that are not the names of its fields."""

_WHERE_THERE = ("tenants", "groups", "trunks", "merge")
"""Fields of a plan that files say where they are not empty, as those of before do not know them."""

_MEMORY = tuple(
    f"{name}_bytes_per_token" for name in ("activation", "kv", "kv_grad", "replay", "input", "deferred", "expert")
)
"""Fields of the memory record that stand among the limits in plan.json; those of all layers are divided by these."""
_TOKENS_BESIDE = "cut_saves", "head", "head_working", "working"
_BESIDE = (*(f"{name}_bytes_per_token" for name in _TOKENS_BESIDE), "pass_bytes", "gradient_bytes")
"""Those that stand under ``beside``."""

_beside: dict[str, Any] = dict.fromkeys(_BESIDE, (Amount, ...))
_OF_TYPE: dict[str, Any] = {"int": Whole, "float": Amount, "bool": StrictBool}
_OF_NAME: dict[str, Any] = {
    "num_ranks": Annotated[int, Field(strict=True, ge=1, le=RANKS)],
    "num_stages": Layers,
    "layers_per_stage": Layers,
    "max_activation_bytes": Amount | None,
}
_UNEQUAL = "layers"
"""Likewise, where stages have unequal numbers of layers."""
_LATER: dict[str, Any] = {
    **dict.fromkeys(("equal_size", "groups_in_micro_batch", "padded", "largest_first", "v_shape"), False),
    **dict.fromkeys(("in_step", "round_tokens"), 1),
}
"""Limits that files say where they are not as here, as those of before do not know them."""
_SCALARS = [f for f in fields(Limits) if f.name not in ("memory", _UNEQUAL)]
_limits_fields: dict[str, Any] = {f.name: (_OF_NAME.get(f.name) or _OF_TYPE[str(f.type)], ...) for f in _SCALARS}
_limits_fields |= dict.fromkeys(_MEMORY, (Amount, ...))
_limits_fields |= {name: (_OF_TYPE[type(value).__name__], value) for name, value in _LATER.items()}
_limits_fields[_UNEQUAL] = (list[Layers], [])
_limits_fields["equal_counts"] = _limits_fields.pop("all_in_step")
_limits_fields["expert_bytes_per_token"] = (Amount, 0.0)
_limits_fields["beside"] = (create_model("_Beside", __base__=_Form, **_beside), ...)
_Limits = create_model("_Limits", __base__=_Form, **_limits_fields)


class _Experts(_Form):
    planner: StrictStr
    slots: Whole
    tolerance: Annotated[float, Field(strict=True, ge=1, le=AMOUNT)]
    least_tokens: Whole
    node_ranks: Whole
    keep: StrictBool = True
    copy_tokens: Whole = 0
    once_topk: Whole = 0
    copies: list[list[list[Whole]]] = []


class _Step(_Form):
    lengths: Annotated[list[Whole], Field(max_length=SEQUENCES)]
    tenants: list[Whole] | None = None
    groups: list[Whole] = []
    trunks: list[Whole] = []
    num_ranks: Whole
    max_tokens: Whole
    limits: dict[str, Any] | None = None
    micro_batches: list[_MicroBatch]
    order: list[list[tuple[PassKind, Whole]]] = []
    merge: list[list[Whole]] = []
    recompute: list[list[Whole]] = []
    offload: list[Amount] = []
    backward: list[_MicroBatch] = []
    replayed: list[Whole] = []
    experts: _Experts | None = None
    made_by: StrictStr = ""
    bound_s: Amount = 0.0
    digest: StrictStr | None = None
    checksum: StrictStr | None = None


class _Cap(_Form):
    model_config = ConfigDict(extra="allow")

    max_tokens: Whole | None = None


class _File(_Form):
    format: Literal[1]
    caps: dict[str, _Cap] = {}
    steps: list[dict[str, Any]]


def step_json(plan: StepPlan) -> dict[str, Any]:
    """A step of plan.json: enough to check the plan without our code."""
    row = {
        "lengths": _lists(plan.lengths),
        "num_ranks": plan.limits.num_ranks,
        "max_tokens": plan.limits.max_tokens,
        "limits": _limits_json(plan.limits),
        "micro_batches": [_micro_batch_json(m) for m in plan.micro_batches],
        "order": _lists(plan.order),
        "recompute": _lists(plan.recompute),
        "offload": _lists(plan.offload),
        "backward": [_micro_batch_json(m) for m in plan.backward],
        "replayed": _lists(plan.replayed),
        "made_by": plan.made_by,
        "bound_s": plan.bound_s,
        "digest": plan.digest.hex(),
    }
    row |= {name: _lists(values) for name in _WHERE_THERE if len(values := getattr(plan, name))}
    if plan.experts != EXPERTS_AT_HOME:
        row["experts"] = {name: _lists(value) for name, value in plan.experts._asdict().items()}
    return {**row, "checksum": _checksum(row)}


def file_json(plans: Iterable[StepPlan], caps: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A plan.json; ``caps``: what the recipe asked for, by plugin."""
    return {"format": 1, "caps": caps, "steps": [step_json(plan) for plan in plans]}


def read_plans(path: str | Path, limits: Limits | None = None) -> tuple[StepPlan, ...]:
    """The plans of a plan.json, each checked against every law.

    ``limits``: what the plans are held to; None takes what the file says. Raises PlanError where the file cannot be
    read or is damaged, or a plan breaks a law or was made under a higher cap on tokens than any that the recipe asked
    for.
    """
    name = f"the plan {shorten(str(path))}"
    try:
        data = reading.read_json(path, name, _DO, reading.PLAN_BYTES)
    except EvenloadError as error:
        raise PlanError(error.what, error.found, error.do) from error
    file = described(data, _File, f"{name} is no plan.json", _DO, PlanError)
    caps = [cap.max_tokens for cap in file.caps.values() if cap.max_tokens is not None]
    plans = []
    for number, row in enumerate(file.steps):
        plans.append(check(read_step(row, limits)))
        if caps and row["max_tokens"] > max(caps):
            detail = f"{row['max_tokens']} tokens a rank, asked for were {max(caps)}"
            raise PlanError(f"step {number} of {name} was made under a higher cap", detail, _DO)
    return tuple(plans)


def read_step(data: Mapping[str, Any], limits: Limits | None = None) -> StepPlan:
    """The plan of a step of plan.json, not yet checked against the laws.

    ``limits``: what the plan is held to; None takes what the step says. Raises PlanError where it is no step, digest or
    checksum are those of another, or nobody says its limits.
    """
    row = described(data, _Step, "this is not a step of a plan.json", _DO, PlanError)
    own = None if row.limits is None else _limits(row.limits)
    held_to = limits or own
    if held_to is None:
        raise PlanError("plan.json does not say its limits", "no key limits", "give those that it was made under")
    if own is not None and (row.num_ranks, row.max_tokens) != (own.num_ranks, own.max_tokens):
        raise PlanError("plan.json says twice what ranks and caps are", "limits of another plan", _DO)
    if row.checksum is not None and row.checksum != _checksum({k: v for k, v in data.items() if k != "checksum"}):
        raise PlanError("a step of plan.json has changed since it was written", "another checksum", _DO)
    if row.tenants is not None and len(row.tenants) != len(row.lengths):
        detail = f"{len(row.tenants)}, {len(row.lengths)}"
        raise PlanError("plan.json has not one tenant for each sequence", detail, _DO)
    plan = StepPlan(
        lengths=as_lengths(row.lengths),
        tenants=as_lengths(row.tenants or []),
        groups=as_lengths(row.groups),
        trunks=as_lengths(row.trunks),
        micro_batches=tuple(map(_micro_batch, row.micro_batches)),
        limits=held_to,
        order=tuple(tuple(Op(kind, number) for kind, number in stage) for stage in row.order),
        merge=_tuples(row.merge),
        recompute=_tuples(row.recompute),
        made_by=row.made_by,
        bound_s=row.bound_s,
        backward=tuple(map(_micro_batch, row.backward)),
        replayed=_tuples(row.replayed),
        offload=_tuples(row.offload),
        experts=ExpertPolicy(**_tuples(row.experts)) if row.experts else EXPERTS_AT_HOME,
    )
    if row.digest is not None and row.digest != plan.digest.hex():
        raise PlanError("a step of plan.json is not the plan that was written", "another digest", _DO)
    return plan


def _limits_json(limits: Limits) -> dict[str, Any]:
    scalars = {f.name: value for f in _SCALARS if (value := getattr(limits, f.name)) != _LATER.get(f.name)}
    scalars["equal_counts"] = scalars.pop("all_in_step")
    if limits.max_activation_bytes == float("inf"):
        scalars["max_activation_bytes"] = None

    def written(names: Iterable[str]) -> dict[str, float]:
        return {name: getattr(limits.memory, name) / _divisor(name, limits.mean_layers) for name in names}

    of_layer = written(_MEMORY)
    if not limits.memory.expert_bytes_per_token:
        of_layer.pop("expert_bytes_per_token")  # as files of before have it
    unequal = {_UNEQUAL: list(limits.layers)} if limits.layers else {}
    return {**scalars, **unequal, **of_layer, "beside": written(_BESIDE)}


def _limits(values: dict[str, Any]) -> Limits:
    form = described(values, _Limits, "the limits in plan.json are none", _DO, PlanError).model_dump()
    amounts = form.pop("beside") | {name: form.pop(name) for name in _MEMORY}
    own = form[_UNEQUAL] = tuple(form[_UNEQUAL])
    if own and (len(own), max(own)) != (form["num_stages"], form["layers_per_stage"]):
        detail = f"layers {list(own)}, {form['num_stages']} stages of at most {form['layers_per_stage']}"
        raise PlanError("the limits in plan.json give other stages than there are", detail, _DO)
    layers = sum(own) / len(own) if own else form["layers_per_stage"]
    form["all_in_step"] = form.pop("equal_counts")
    memory = MemoryCost(**{name: value * _divisor(name, layers) for name, value in amounts.items()})
    if form["max_activation_bytes"] is None:
        form["max_activation_bytes"] = float("inf")
    return Limits(**form, memory=memory)


def _divisor(name: str, layers: float) -> float:
    """By what a field of the memory record is divided in plan.json, which has bytes of one layer."""
    return layers if name.endswith("_per_token") and name not in NOT_OF_ALL_LAYERS else 1


def _micro_batch_json(micro_batch: MicroBatch) -> dict[str, Any]:
    """Without what is at its default."""
    values = {_KEY_OF.get(name, name): _lists(value) for name, value in micro_batch._asdict().items()}
    return {name: value for name, value in values.items() if value or name in ("slices", "ranks")}


def _micro_batch(row: _MicroBatch) -> MicroBatch:
    values = {name: _tuples(getattr(row, _KEY_OF.get(name, name))) for name in MicroBatch._fields}
    return MicroBatch(**values | {"slices": tuple(starmap(Slice, row.slices))})


def _lists(value: Any) -> Any:
    """A field of a plan as JSON has it."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(map(_lists, value)) if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _tuples(one) for name, one in value}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _checksum(row: Mapping[str, Any]) -> str:
    """A hash of what a step says, whatever the order of its keys."""
    text = json.dumps(row, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
