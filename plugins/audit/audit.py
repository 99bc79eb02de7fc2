"""`evenload audit`: a script's own first step, each of its samples against the same sample alone; nothing is planned.

Judged before the first update, of what `watched` has seen:

    attention, positions   the hidden state of each token is what it is alone, in the forward and back at the embeddings
    targets                what the loss asks of each state is what cross-entropy of the sample's next token would ask
    divisor                each token counts as much as any other of the step, in all micro-batches and on all ranks

A loss that is another than cross-entropy of the next token is noticed, and then targets and divisor are not judged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...core.costs.costs import Costs
from ...core.recipe.recipe import Recipe
from ...integrations.transformers.planning import chain_for
from ...integrations.transformers.proof import tolerance_of
from ...integrations.unmodified.planned_runs import end_together, on_release
from ...integrations.unmodified.run_folder import RunFolder
from ...runtime.world.agreement import everyone, rank_and_size
from . import watched
from .alone import OFFSETS, Compared, compared
from .borders import SampleSpan, spans
from .remarks import HeldSamples, remarks
from .rows import BORDER
from .watched import Seen, causal_model_of, lengths_of, unread_tensors

_MOST_WRONGS = 200
"""That a rank tells the others."""
_OF_TARGETS = 3.0
"""Times the tolerance of hidden states is that of gradients at them: the output layer rounds too."""
_OF_COUNTS = 20.0
"""Times smaller is that of what tokens count, which is the median of a micro-batch."""
_ATTENTION = "attention looks across samples or padding"
_POSITIONS = "positions do not start again at 0: a sample is computed at other positions than alone"


class Judged(NamedTuple):
    """A sample of a micro-batch of this rank."""

    micro_batch: int
    sample: int
    """Its number in the micro-batch."""
    span: SampleSpan
    is_last: bool
    """Nothing but padding follows it in its row."""
    result: Compared
    at_own_positions: Compared | None
    """Alone at the positions that the script gave it; None: those count up from 0."""
    tolerance: float


_hooks: list[Any] = []


def start_model(wrapped: Any, model: Any, args: Any, kwargs: Any, recipe: Recipe) -> None:
    """`PreTrainedModel.__init__`: the model is watched, and the process ends before the first update."""
    watched.start_model(wrapped, model, args, kwargs)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(lambda *_: _end_with_verdict(recipe)))


@on_release
def release() -> None:
    """Watch nothing more; for after the rows are off."""
    watched.forget()
    while _hooks:
        _hooks.pop().remove()


def _end_with_verdict(recipe: Recipe) -> None:
    folder, rank = RunFolder.of_process(), rank_and_size()[0]
    if any(everyone(bool(watched.seen))):
        verdict = audited(recipe, int(os.environ.get(BORDER, -1)))
        if folder is not None and rank == 0:
            folder.write_record("audit", verdict)
        end_together()


def audited(recipe: Recipe, border: int = -1) -> dict[str, Any]:
    """What is documented of ``audit --json``, of the forwards that were seen until now. Collective.

    Args:
        recipe: says what passes cost.
        border: the token that ends a sample; negative: none does by itself.
    """
    calls = [one for one in watched.seen if one.slopes_BTH is not None]
    unread = sorted({key for one in calls for key in unread_tensors(one)} | {"no input_ids" for c in calls if _odd(c)})
    calls = [one for one in calls if not unread_tensors(one) and not _odd(one)]
    judged = _judged(calls, border if border >= 0 else None)
    next_tokens = _sums(everyone(_matches(judged)))
    trained = max(1, next_tokens[-1])
    offset = next((one for one, count in zip(OFFSETS, next_tokens, strict=False) if 2 * count > trained), None)
    wrongs = [*_of_states(judged), *_of_targets(judged, offset)]
    counts = _counts(judged, offset)
    of_ranks = everyone((wrongs[:_MOST_WRONGS], counts, _losses(judged), _work(recipe, calls), len(wrongs), unread))
    rank_wrongs, rank_counts, losses, work, numbers, others = zip(*of_ranks, strict=True)
    unlike = _unlike([{**one, "rank": rank} for rank, own in enumerate(rank_counts) for one in own])
    of_all = [{"rank": rank, **one} for rank, own in enumerate(rank_wrongs) for one in own] + unlike
    (num_samples, num_targets, weight, script, alone) = _sums([list(map(float, one)) for one in losses])
    seconds = [sum(one["seconds"] for one in own) for own in work]
    slots, padding = (sum(one[key] for own in work for one in own) for key in ("slots", "padding"))
    return {
        "ranks": len(of_ranks),
        "micro_batches": [len(own) for own in work],
        "samples": int(num_samples),
        "targets": int(num_targets),
        "padding_frac": padding / slots if slots else 0.0,
        "busiest_over_mean": max(seconds) * len(seconds) / sum(seconds) if sum(seconds) else 1.0,
        "loss": script / weight if weight and offset == 1 else None,
        "loss_alone": alone / num_targets if num_targets else None,
        "judged": {"states": bool(num_samples), "targets": offset is not None, "divisor": offset == 1},
        "wrong": of_all,
        "num_wrong": sum(numbers) + len(unlike),
        "remarks": remarks(everyone(HeldSamples.of(_tokens(one, calls) for one in judged))),
        "not_judged": sorted({key for own in others for key in own}),
    }


def _tokens(one: Judged, calls: Sequence[Seen]) -> tuple[Tensor, Tensor]:
    """The tokens [L] of a sample, and whether each predicts a target [L]."""
    row, start, stop = one.span
    tokens_BT: Tensor = calls[one.micro_batch].arguments["input_ids"]
    return tokens_BT[row, start:stop].cpu(), one.result.trained_L.cpu()


def _odd(one: Seen) -> bool:
    tokens = one.arguments.get("input_ids")
    return not isinstance(tokens, Tensor) or tokens.dim() != 2 or one.hidden_BTH is None


def _judged(calls: Sequence[Seen], border: int | None) -> list[Judged]:
    """Every sample alone. Collective: under sharded weights all ranks run as many."""
    jobs = [(m, one, n, span, last) for m, one in enumerate(calls) for n, span, last in _numbered(one, border)]
    own = [_own_positions(one, span) for _, one, _, span, _ in jobs]
    judged = []
    for (m, one, n, span, last), positions_L in zip(jobs, own, strict=True):
        result = compared(one, span)
        at_own = None if positions_L is None else compared(one, span, positions_L)
        dtypes = {one.hidden_BTH.dtype if one.hidden_BTH is not None else torch.float32}
        dtypes |= {one.autocast[1]} if one.autocast[2] else set()
        judged.append(Judged(m, n, span, last, result, at_own, tolerance_of(causal_model_of(one.decoder), dtypes)))
    own_runs = len(jobs) + sum(positions_L is not None for positions_L in own)
    for _ in range(max(everyone(own_runs)) - own_runs if jobs else 0):
        compared(jobs[-1][1], jobs[-1][3])
    return judged


def _numbered(one: Seen, border: int | None) -> list[tuple[int, SampleSpan, bool]]:
    tokens_BT = one.arguments["input_ids"]
    of_batch = spans(
        tokens_BT,
        one.of_tokens("attention_mask"),
        one.of_tokens("position_ids"),
        one.arguments.get("cu_seq_lens_q"),
        lengths_of(tokens_BT),
        border,
    )
    ends = {span.row: span.stop for span in of_batch}
    return [(n, span, span.stop == ends[span.row]) for n, span in enumerate(of_batch)]


def _own_positions(one: Seen, span: SampleSpan) -> Tensor | None:
    """The positions of a sample in the script's call; None where they count up from 0."""
    tokens_BT, positions_BT = one.arguments["input_ids"], one.of_tokens("position_ids")
    places_L = torch.arange(span.start, span.stop, device=tokens_BT.device)
    own_L = places_L if positions_BT is None else positions_BT[span.row, span.start : span.stop]
    return None if torch.equal(own_L, places_L - span.start) else own_L


def _matches(judged: Sequence[Judged]) -> list[int]:
    """Trained tokens whose target is that of each of `OFFSETS`, and all of them, last tokens left out."""
    rows = [[0] * (len(OFFSETS) + 1)]
    for one in judged:
        trained_L = one.result.trained_L.clone()
        trained_L[-1:] = False
        near = [(trained_L & (off_L <= _OF_TARGETS * one.tolerance)) for off_L in one.result.targets_L.values()]
        rows.append([int(row_L.sum()) for row_L in (*near, trained_L)])
    return _sums(rows)


def _sums(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _wrong(one: Judged, token: int, what: str, detail: str) -> dict[str, Any]:
    row, start, stop = one.span
    where = {"micro_batch": one.micro_batch, "sample": one.sample, "row": row, "start": start, "stop": stop}
    return {**where, "token": token, "what": what, "found": detail}


def _of_states(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Samples whose tokens are computed otherwise than alone, each by its first token. Where states are, gradients of
    the samples that they look at are too, which is no wrong of these."""
    wrongs: list[dict[str, Any]] = []
    for name in ("hidden", "embedded"):
        known = {one["micro_batch"] for one in wrongs}
        for one in judged:
            off_L: Tensor = getattr(one.result, f"{name}_L")
            places = (~(off_L <= one.tolerance)).nonzero().flatten()
            if not len(places) or one.micro_batch in known:
                continue
            token = int(places[0])
            moved = one.at_own_positions is not None and bool(
                (getattr(one.at_own_positions, f"{name}_L") <= one.tolerance).all()
            )
            noun = "hidden state" if name == "hidden" else "gradient at the embedding"
            detail = f"{noun} off by {float(off_L[token]):.1e}, {one.tolerance:g} is rounding"
            wrongs.append(_wrong(one, token, _POSITIONS if moved else _ATTENTION, detail))
    return wrongs


def _of_targets(judged: Sequence[Judged], offset: int | None) -> list[dict[str, Any]]:
    """Tokens that are trained towards another target than the next token of their sample; none where the loss is none
    of the next token (``offset`` None), which asks something else of all."""
    wrongs: list[dict[str, Any]] = []
    for one in judged if offset is not None else ():
        most = _OF_TARGETS * one.tolerance
        last = len(one.result.trained_L) - 1
        for token in one.result.trained_L.nonzero().flatten().tolist():
            near = [name for k, name in OFFSETS.items() if float(one.result.targets_L[k][token]) <= most]
            if token == last:
                behind = "padding, or what follows it" if one.is_last else "the first token of the next sample"
                wrongs.append(_wrong(one, token, "the last token of a sample has a target", f"it predicts {behind}"))
            elif OFFSETS[1] not in near:
                what = "labels are shifted" if near else "a label that is not the next token of its sample"
                detail = f"it predicts {near[0]}" if near else "it predicts another token than the next"
                wrongs.append(_wrong(one, token, what, detail))
    return wrongs


def _counts(judged: Sequence[Judged], offset: int | None) -> list[dict[str, Any]]:
    """What a token counts in each micro-batch of this rank in which all count the same."""
    rows = []
    for m in sorted({one.micro_batch for one in judged}) if offset == 1 else ():
        own = [one for one in judged if one.micro_batch == m]
        most = _OF_TARGETS * own[0].tolerance
        right = [one.result.trained_L & (one.result.targets_L[1] <= most) for one in own]
        counts = torch.cat([one.result.counts_L[right_L] for one, right_L in zip(own, right, strict=True)])
        if not len(counts) or float(counts.max() - counts.min()) > 10 * most * float(counts.median()):
            continue
        first = next((one, int(right_L.nonzero()[0])) for one, right_L in zip(own, right, strict=True) if right_L.any())
        place = _wrong(*first, "", "")
        rows.append({**place, "count": float(counts.median()), "targets": len(counts), "tolerance": own[0].tolerance})
    return rows


def _unlike(counts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Micro-batches in which a token counts otherwise than in the one with the most targets."""
    if not counts:
        return []
    usual = max(counts, key=lambda one: one["targets"])
    wrongs = []
    for one in counts:
        if abs(one["count"] / usual["count"] - 1) <= max(2e-3, one["tolerance"] / _OF_COUNTS):
            continue
        share = one["count"] * one["targets"] / (usual["count"] * usual["targets"])
        means = abs(share - 1) <= max(2e-3, one["tolerance"])
        what = (
            "a mean of means: each micro-batch is divided by its own targets" if means else "micro-batches count unlike"
        )
        detail = (
            f"a token counts {one['count'] / usual['count']:.4g} times as much as in micro-batch "
            f"{usual['micro_batch']} of rank {usual['rank']}; targets {one['targets']} and {usual['targets']}"
        )
        place = {key: one[key] for key in ("rank", "micro_batch", "sample", "row", "start", "stop", "token")}
        wrongs.append({**place, "what": what, "found": detail})
    return wrongs


def _losses(judged: Sequence[Judged]) -> list[float]:
    """Samples, targets, the sum of what these count, and sums of their losses: so counted, and alone."""
    rows = [[0.0] * 5]
    for one in judged:
        result = one.result
        trained_L = result.trained_L.clone()
        trained_L[-1:] = False
        counts_L = result.counts_L[trained_L]
        script, alone = result.losses_L[trained_L], result.alone_L[trained_L]
        rows.append([1.0, len(counts_L), *map(float, (counts_L.sum(), (counts_L * script).sum(), alone.sum()))])
    return _sums(rows)


def _work(recipe: Recipe, calls: Sequence[Seen]) -> list[dict[str, Any]]:
    """Slots, padding and predicted seconds of each micro-batch of this rank."""
    if not calls:
        return []
    model = causal_model_of(calls[0].decoder)
    costs: Costs = chain_for(recipe, model, zero_stage=0, half=False, whole=True, rows=True).context.costs
    rows = []
    for one in calls:
        tokens_BT, mask_BT = one.arguments["input_ids"], one.of_tokens("attention_mask")
        lengths = [span.stop - span.start for _, span, _ in _numbered(one, None)]
        padded = lengths if len(tokens_BT) == 1 else [tokens_BT.shape[1]] * len(tokens_BT)
        padding = 0 if mask_BT is None else int((mask_BT == 0).sum())
        seconds = costs.launch_s + float(costs.sequence_s(padded).sum())
        rows.append({"slots": tokens_BT.numel(), "padding": padding, "seconds": seconds})
    return rows
