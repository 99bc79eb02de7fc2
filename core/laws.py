"""The laws every plan must keep before any rank may run it. Each broken one raises a PlanError that says where.

A plan that breaks none of them computes every token once, in an order in which every key and value that a slice needs
is still there, within the caps, and cannot deadlock: `_passes_meet` runs the lists of all ranks of all stages against
each other. Cost: O(slices log slices) in numpy plus O(passes x stages) in Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np

from .costs.memory import peaks_of_stage
from .errors import PlanError
from .plan.expert_policy import EXPERTS_AT_HOME
from .plan.limits import Limits
from .plan.order import orders_of_stage
from .plan.program import exchanges, lower
from .plan.step_plan import CpComm, Lengths, MicroBatch, Op, Slice, StepPlan, fact_of_plan
from .plan.token_layout import CpGroup, attended, cp_group_of, tokens_of_ranks
from .plan.trie import Branching
from .simulate.events import play

_CP_COMMS = get_args(CpComm)
_NO_V = "set plugins.pipeline.v_shape=false"


def check(plan: StepPlan) -> StepPlan:
    """The plan, if it keeps every law; raise `PlanError` with the first broken one otherwise.

    Where the law knows no remedy, the error says who made the plan.
    """
    try:
        _keeps_every_law(plan, plan.limits)
    except PlanError as error:
        if error.do:
            raise
        do = f"correct what made the plan ({plan.made_by or 'not said'}), or disable it"
        raise PlanError(error.what, error.found, do) from None
    return plan


@fact_of_plan(
    *("lengths", "micro_batches", "backward", "replayed", "order", "merge", "recompute", "offload"),
    *("limits", "tenants", "experts", "groups", "trunks"),
)
def _keeps_every_law(plan: StepPlan, limits: Limits) -> bool:
    """True; asked once under the same limits."""
    for law in (
        _every_token_once,
        _trunks_are_there,
        _ranks_exist,
        _together,
        _padded,
        _rounded,
        _largest_first,
        _sharing,
        _caps,
        _slices_ascend,
        _backward_groups,
        _order_is_complete,
        _devices_take_all,
        _slices_keep_their_prefix,
        _links_keep_their_order,
        _all_in_step,
        _groups_in_step,
        _passes_meet,
        _recompute_fits,
        _offload_fits,
        _memory,
        check_policy,
    ):
        law(plan)
    return True


def _every_token_once(plan: StepPlan) -> None:
    lengths = plan.lengths
    if lengths.ndim != 1:
        raise PlanError("lengths are not a row of integers", f"an array of shape {lengths.shape}")
    if len(plan.tenants) not in (0, len(lengths)):
        raise PlanError("a plan has not one tenant for each sequence", f"{len(plan.tenants)}, {len(lengths)}")
    if (plan.tenants < 0).any():
        index = int((plan.tenants < 0).argmax())
        raise PlanError("a tenant's number is below 0", f"{plan.tenants[index]} of sequence {index}")
    if (lengths < 1).any():
        index = int((lengths < 1).argmax())
        raise PlanError("a sequence has no tokens", f"sequence {index} of length {lengths[index]}")
    trunks = plan.trunks if len(plan.trunks) else np.zeros_like(lengths)
    if len(trunks) != len(lengths):
        raise PlanError("a plan has not one trunk for each sequence", f"{len(trunks)}, {len(lengths)}")
    _covers(plan.micro_batches, lengths, trunks, "")
    if plan.backward:
        _covers(plan.backward, lengths, trunks, " in the backward pass")


def _trunks_are_there(plan: StepPlan) -> None:
    """What a sequence does not compute itself, the slice that it continues and those before that have: in its
    micro-batch. Such a plan cuts and pads nothing, and each micro-batch is on one rank."""
    if not plan.trunks.any():
        return
    if plan.cut or plan.shared or any(m.pad_to for _, m in _both(plan)):
        raise PlanError("sequences share trunks in a plan that cuts, shares or pads some", f"{plan.made_by or '?'}")
    for name, micro_batch in _both(plan):
        if Branching.of(micro_batch.slices) is None:
            raise PlanError("a sequence has no trunk to continue", f"{name}: {micro_batch.slices}")


def _covers(micro_batches: tuple[MicroBatch, ...], lengths: Lengths, trunks: Lengths, where: str) -> None:
    rows = np.array([s for m in micro_batches for s in m.slices], dtype=np.int64).reshape(-1, 3)
    sequence, start, stop = rows.T
    unknown = (sequence < 0) | (sequence >= len(lengths))
    if unknown.any():
        raise PlanError("a slice names a sequence that is not in the batch", f"sequence {sequence[unknown][0]}")
    outside = (start < 0) | (stop <= start) | (stop > lengths[sequence])
    if outside.any():
        index, a, b = rows[outside][0]
        raise PlanError("a slice lies outside its sequence", f"[{a}, {b}) of sequence {index}, length {lengths[index]}")
    by_start = np.lexsort((start, sequence))
    sequence, start, stop = rows[by_start].T
    first = np.ones(len(rows), dtype=bool)
    first[1:] = sequence[1:] != sequence[:-1]
    expected = np.where(first, trunks[sequence], np.roll(stop, 1))
    wrong = start != expected
    if wrong.any():
        at = int(wrong.argmax())
        word = "missing" if start[at] > expected[at] else "planned twice"
        low, high = sorted((int(start[at]), int(expected[at])))
        raise PlanError(f"tokens are {word}{where}", f"[{low}, {high}) of sequence {sequence[at]}")
    covered = np.zeros(len(lengths), dtype=np.int64)
    np.maximum.at(covered, sequence, stop)
    short = covered < lengths
    if short.any():
        index = int(short.argmax())
        raise PlanError(f"tokens are missing{where}", f"[{covered[index]}, {lengths[index]}) of sequence {index}")


def _both(plan: StepPlan) -> Iterator[tuple[str, MicroBatch]]:
    """Every micro-batch of both directions under a name for messages."""
    yield from ((f"micro-batch {i}", m) for i, m in enumerate(plan.micro_batches))
    yield from ((f"backward micro-batch {i}", m) for i, m in enumerate(plan.backward))


def _ranks_exist(plan: StepPlan) -> None:
    size = plan.limits.num_ranks
    for name, micro_batch in _both(plan):
        ranks = micro_batch.ranks
        if not ranks or min(ranks) < 0 or max(ranks) >= size or len(set(ranks)) != len(ranks):
            raise PlanError("a micro-batch has impossible ranks", f"{name}: {ranks} of {size} ranks")


def _together(plan: StepPlan) -> None:
    """Sequences of a group are on the same ranks, or in one micro-batch; ranks have as many of them where asked."""
    groups, limits = plan.groups.tolist(), plan.limits
    if len(groups) not in (0, len(plan.lengths)):
        raise PlanError("a plan has not one group for each sequence", f"{len(groups)}, {len(plan.lengths)}")
    for passes in (plan.micro_batches, plan.backward) if groups else ():
        places: dict[int, object] = {}
        for number, m in enumerate(passes):
            place = number if limits.groups_in_micro_batch else m.ranks
            for s in m.slices:
                if places.setdefault(groups[s.sequence], place) != place:
                    where = "micro-batches" if limits.groups_in_micro_batch else "ranks"
                    detail = f"sequence {s.sequence} of group {groups[s.sequence]} in micro-batch {number} of {m.ranks}"
                    raise PlanError(f"a group of sequences is split over {where}", detail)
    if limits.equal_size:
        unit = groups or range(len(plan.lengths))
        own: list[set[int]] = [set() for _ in range(limits.num_ranks)]
        for m in plan.micro_batches:
            for rank in m.ranks:
                own[rank].update(unit[s.sequence] for s in m.slices)
        counts = sorted(map(len, own))
        if counts[-1] - counts[0] > 1:  # by one only where their number cannot be divided
            raise PlanError("ranks have unequal numbers of sequences", f"between {counts[0]} and {counts[-1]}")


def _padded(plan: StepPlan) -> None:
    """Where sequences are kept apart by rows alone, they are whole, and those of a micro-batch have one length."""
    for name, m in _both(plan) if plan.limits.padded else ():
        cut = next((s.sequence for s in m.slices if s.sequence in plan.cut), None)
        if cut is not None:
            raise PlanError("a row holds a part of a sequence", f"{name}: sequence {cut}", "disable slices")
        if not m.pad_to and len({s.length for s in m.slices}) > 1:
            raise PlanError("the rows of a micro-batch have several lengths", f"{name}: pad_to 0", "pad them")


def _rounded(plan: StepPlan) -> None:
    """Micro-batches are filled up to the multiple of tokens that was asked for."""
    for name, m in _both(plan) if plan.limits.round_tokens > 1 else ():
        if m.can_be_rounded and m.num_padded_tokens % plan.limits.round_tokens:
            detail = f"{name}: {m.num_padded_tokens} tokens, a multiple of {plan.limits.round_tokens} is asked for"
            raise PlanError("a micro-batch is not filled up", detail, "give it round_to")


def _largest_first(plan: StepPlan) -> None:
    """A rank's micro-batches descend in tokens where that was asked for and is free."""
    for rank in range(plan.limits.num_ranks) if plan.limits.largest_first and plan.is_sortable else ():
        tokens = [plan.micro_batches[i].num_padded_tokens for i in plan.of_rank(rank)]
        if tokens != sorted(tokens, reverse=True):
            raise PlanError("a rank's largest micro-batch does not run first", f"rank {rank}: {tokens}", "sort them")


def _sharing(plan: StepPlan) -> None:
    """Ranks that share a micro-batch all have tokens of it, in layouts that the attention of its cp_comm can run."""
    for name, m in _both(plan):
        if m.cp_comm not in _CP_COMMS:
            raise PlanError("a micro-batch has a cp_comm that does not exist", f"{name}: {m.cp_comm!r}")
        if len(m.ranks) == 1 and not m.cp_groups:
            continue
        if m.cp_comm and plan.limits.whole_sequences:
            raise PlanError("this host runs every micro-batch on one rank", f"{name}: ranks {m.ranks}", "disable mesh")
        if m.cp_groups and len(m.cp_groups) != len(m.slices):
            raise PlanError("a micro-batch has not one CP group for each slice", f"{name}: {len(m.cp_groups)}")
        if m.cp_comm and m.pad_to:
            raise PlanError("a shared micro-batch is padded", f"{name}: pad_to {m.pad_to}")
        if (m.cp_comm == "hybrid") != (m.ulysses_degree > 0):
            detail = f"{name}: cp_comm {m.cp_comm or 'none'}, {m.ulysses_degree}"
            raise PlanError("ulysses_degree belongs to the cp_comm hybrid", detail)
        for number in range(len(m.slices)) if m.cp_groups else range(min(1, len(m.slices))):
            _home_is_possible(plan, name, m, number)
        if m.cp_groups and not m.remap and set(m.ranks) != {rank for cp_group in m.cp_groups for rank in cp_group}:
            raise PlanError("a micro-batch has ranks that are in no slice's CP group", name)
        counts = tokens_of_ranks(m)
        if min(counts.values()) < 1:
            detail = f"{name}: {m.num_padded_tokens} tokens on {len(m.ranks)} ranks"
            raise PlanError("a rank of a micro-batch would have no token", detail)


def _home_is_possible(plan: StepPlan, name: str, m: MicroBatch, number: int) -> None:
    (ranks, ulysses_degree), heads = cp_group_of(m, number), plan.limits.heads
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(m.ranks):
        raise PlanError("the CP group of a slice is not among the ranks of its micro-batch", f"{name}: {ranks}")
    if len(ranks) > 1 and (ulysses_degree < 1 or len(ranks) % ulysses_degree):
        raise PlanError("groups that share heads do not divide a CP group", f"{name}: {ulysses_degree} of {len(ranks)}")
    if m.cp_comm == "hybrid" and not 1 < m.ulysses_degree < len(m.ranks):
        raise PlanError("ulysses_degree does not divide the ranks", f"{name}: {m.ulysses_degree} of {len(m.ranks)}")
    if heads and ulysses_degree > heads:
        detail = f"{name}: {ulysses_degree} ranks, {heads} heads"
        raise PlanError("more ranks share heads than there are", detail, "use a ring, or a hybrid with smaller groups")


def _caps(plan: StepPlan) -> None:
    cap = plan.limits.max_tokens
    for name, micro_batch in _both(plan):
        pad = micro_batch.pad_to
        if pad and max((s.length for s in micro_batch.slices), default=0) > pad:
            raise PlanError("a slice is longer than its padding", f"{name}: pad_to {pad}")
        per_rank = max(tokens_of_ranks(micro_batch).values())
        if per_rank > cap:
            detail = f"{name}: {per_rank} tokens on a rank, cap {cap}"
            do = "raise max_tokens, cut its sequences or share it"
            raise PlanError("a micro-batch is over the token cap", detail, do)


def _slices_ascend(plan: StepPlan) -> None:
    """Slices of a sequence are launched in order, in different micro-batches, on ranks that hold the earlier ones."""
    if not plan.cut:
        return
    if plan.limits.whole_sequences:
        raise PlanError("this host runs whole sequences only", f"sequence {min(plan.cut)} is cut", "disable slices")
    stop_of: dict[int, int] = {}
    group_before: dict[int, CpGroup] = {}
    for index, micro_batch in enumerate(plan.micro_batches):
        own = [(number, s) for number, s in enumerate(micro_batch.slices) if s.sequence in plan.cut]
        _refuse_two_slices(f"micro-batch {index}", micro_batch.slices)
        for number, s in own:
            if s.start != stop_of.get(s.sequence, 0):
                detail = f"micro-batch {index} runs [{s.start}, {s.stop}) after {stop_of.get(s.sequence, 0)} tokens"
                raise PlanError(f"slices of sequence {s.sequence} are launched out of order", detail)
            cp_group = cp_group_of(micro_batch, number)
            if s.start and not _keeps_prefix(group_before[s.sequence], cp_group):
                detail = f"prefix on ranks {group_before[s.sequence].ranks}, micro-batch {index} on {cp_group.ranks}"
                raise PlanError(f"a slice of sequence {s.sequence} runs away from its prefix KV", detail)
            for place in range(len(cp_group.ranks)) if len(cp_group.ranks) > 1 and micro_batch.cp_comm else ():
                if not attended(s, cp_group, place):
                    detail = f"{s.length} tokens on {len(cp_group.ranks)} ranks in micro-batch {index}"
                    raise PlanError(f"a slice of sequence {s.sequence} has ranks without a token of it", detail)
            stop_of[s.sequence] = s.stop
            group_before[s.sequence] = cp_group


def _keeps_prefix(before: CpGroup, now: CpGroup) -> bool:
    """A ring may grow, since each rank brings the part of the prefix that it has; heads stay with their ranks."""
    if before.ulysses_degree == now.ulysses_degree == 1:
        return set(before.ranks) <= set(now.ranks)
    return before == now


def _refuse_two_slices(name: str, slices: Sequence[Slice]) -> None:
    if len({s.sequence for s in slices}) < len(slices):
        raise PlanError("a micro-batch holds two slices of one sequence", name)


def _backward_groups(plan: StepPlan) -> None:
    """Groups of its own in the backward pass: where the forward ran, slices descending, replayed or equal to a kept."""
    replayed, count = plan.replayed, len(plan.passes("B"))
    if list(replayed) != sorted(set(replayed)) or any(not 0 <= j < count for j in replayed):
        raise PlanError("replayed does not list backward micro-batches in ascending order", f"{replayed} of {count}")
    if not plan.backward:
        return
    if plan.limits.whole_sequences:
        raise PlanError("this host runs the same micro-batches forward and backward", f"{count} backward micro-batches")
    if plan.recompute:
        raise PlanError("layers are recomputed in a plan whose backward has groups of its own", plan.made_by or "?")
    again = set(replayed)
    alone = [j for j, i in enumerate(plan.forward_of) if i is None and j not in again]
    if alone:
        detail = f"backward micro-batch {alone[0]} equals no micro-batch of the forward"
        raise PlanError("a backward micro-batch has neither activations nor a replay", detail, "list it in replayed")
    ranks_of = {s.sequence: cp_group_of(m, k).ranks for m in plan.micro_batches for k, s in enumerate(m.slices)}
    forward = {m for m in plan.micro_batches if len(m.ranks) > 1}
    start_of = dict(enumerate(plan.lengths.tolist()))
    for index, micro_batch in enumerate(plan.backward):
        _refuse_two_slices(f"backward micro-batch {index}", micro_batch.slices)
        if len(micro_batch.ranks) > 1 and micro_batch not in forward:
            detail = f"backward micro-batch {index} on ranks {micro_batch.ranks}"
            raise PlanError("a shared micro-batch runs backward otherwise than forward", detail)
        for number, s in enumerate(micro_batch.slices):
            cp_group = cp_group_of(micro_batch, number).ranks
            if set(cp_group) != set(ranks_of[s.sequence]):
                detail = f"forward on ranks {ranks_of[s.sequence]}, backward on {cp_group}"
                raise PlanError(f"the backward of sequence {s.sequence} runs away from its prefix KV", detail)
            if s.stop != start_of[s.sequence]:
                detail = f"backward micro-batch {index} runs [{s.start}, {s.stop}) before the tokens after it"
                raise PlanError(f"backward slices of sequence {s.sequence} are launched out of order", detail)
            start_of[s.sequence] = s.start


def _all_in_step(plan: StepPlan) -> None:
    """Where all ranks meet in every pass: equal counts, one pattern; the trainer's dummies do the rest."""
    if not plan.limits.all_in_step:
        return
    if plan.limits.num_stages > 1:
        raise PlanError("ranks that run in step have no pipeline stages", f"{plan.limits.num_stages} stages")
    for kind in ("F", "B"):
        counts = [len(plan.of_rank(rank, kind)) for rank in range(plan.limits.num_ranks)]
        if len(set(counts)) > 1:
            detail = f"between {min(counts)} and {max(counts)}"
            raise PlanError("this trainer needs equal micro-batch counts on every rank", detail, "add dummies")
    rows = orders_of_stage(plan, 0)
    patterns = {"".join(op.kind for op in row) for row in rows}
    if len(patterns) > 1:
        detail = " and ".join(sorted(patterns)[:2])
        raise PlanError("ranks that run in step differ in the order of their passes", detail)
    if not plan.shared:
        return
    places = [{op: place for place, op in enumerate(row)} for row in rows]
    for op in [Op(kind, i) for kind in ("F", "B") for i, m in enumerate(plan.passes(kind)) if len(m.ranks) > 1]:
        met = {rank: places[rank].get(op) for rank in plan.passes(op.kind)[op.micro_batch].ranks}
        if len(set(met.values())) > 1:
            detail = f"{op.kind}{op.micro_batch}: number of its pass by rank {met}"
            raise PlanError("this trainer runs all ranks in step, and a shared micro-batch is not", detail)


def _groups_in_step(plan: StepPlan) -> None:
    """What the ranks of a group really run at a stage is alike, pass by pass: every layer with experts is an exchange
    of all of them, forward, recomputed, and backward with those with whom it was forward. Weight gradients exchange
    nothing."""
    size, limits = plan.limits.in_step, plan.limits
    if size == 1:
        return
    if limits.num_ranks % size:
        raise PlanError("groups of ranks in step do not divide the ranks", f"{size} of {limits.num_ranks}")
    for stage, first in itertools.product(range(limits.num_stages), range(0, limits.num_ranks, size)):
        rows = [exchanges(lower(plan, stage, rank)) for rank in range(first, first + size)]
        odd = next((k for k, row in enumerate(rows) if row != rows[0]), None)
        if odd is not None:
            detail = f"stage {stage}, ranks {first} and {first + odd}: {_difference(rows[0], rows[odd])}"
            raise PlanError("ranks that run in step run different passes", detail)


def _difference(row: Sequence[str], other: Sequence[str]) -> str:
    """The first pass in which two rows differ, and what each of them runs there."""
    pairs = itertools.zip_longest(row, other, fillvalue="none")
    at, (here, there) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"pass {at} is {here} on one, {there} on the other"


def _order_is_complete(plan: StepPlan) -> None:
    if not plan.order:
        if plan.cut:
            detail = "sequences are cut and the plan leaves the order to the host's schedule"
            raise PlanError("prefix KV would be freed before later slices need it", detail, "give an order per stage")
        if plan.backward or plan.replayed:
            raise PlanError("the host's own schedule replays nothing", "no order", "give an order per stage")
        return
    if len(plan.order) != plan.limits.num_stages:
        raise PlanError("the order has the wrong number of stages", f"{len(plan.order)}, not {plan.limits.num_stages}")
    wanted = sorted(Op(kind, i) for kind in ("B", "F") for i in range(len(plan.passes(kind))))
    kept = [(index, forward) for index, forward in enumerate(plan.forward_of) if forward is not None]
    replayed = [(index, index) for index in plan.replayed if not plan.backward]
    for stage, ops in enumerate(plan.order):
        if sorted(op for op in ops if op.kind != "W") != wanted:
            detail = f"stage {stage} lists {len(ops)} passes of {len(wanted)}"
            raise PlanError("a stage does not run every pass exactly once", detail)
        place = {op: at for at, op in enumerate(ops)}
        _weight_gradients(plan, stage, place)
        for index, forward in (*kept, *replayed):
            if place[Op("B", index)] < place[Op("F", forward)]:
                raise PlanError("backward runs before forward", f"stage {stage}, micro-batch {index}")


def _devices_take_all(plan: StepPlan) -> None:
    """A device with two stages runs each of their passes once, in the order that the plan says."""
    limits, merge = plan.limits, plan.merge
    if not limits.v_shape:
        if merge:
            raise PlanError(
                "a plan merges the passes of stages that have devices of their own", f"{len(merge)} devices"
            )
        return
    if limits.num_stages % 2 or limits.num_stages < 4:
        raise PlanError("a V of pipeline stages has two stages on each of two devices or more", f"{limits.num_stages}")
    if plan.shared or limits.together > 1:
        detail = "a shared micro-batch" if plan.shared else f"{limits.together} ranks in step"
        raise PlanError("ranks wait for each other in a pass, on devices that have two stages", detail, _NO_V)
    if not plan.micro_batches:
        return
    if len(merge) != limits.num_devices or not plan.order:
        detail = f"{len(merge)} merges of {limits.num_devices} devices, {len(plan.order)} orders"
        raise PlanError("a plan does not say in which order devices take the passes of their two stages", detail)
    for device, row in enumerate(merge):
        wanted = sorted(stage for stage in limits.stages_of_device(device) for _ in plan.order[stage])
        if sorted(row) != wanted:
            detail = f"device {device} lists {len(row)} passes of {len(wanted)}"
            raise PlanError("a device does not take every pass of its stages exactly once", detail)


def _weight_gradients(plan: StepPlan, stage: int, place: dict[Op, int]) -> None:
    """A W follows the backward that left it its work."""
    split = plan.split[stage]
    if not split:
        return
    if not plan.limits.splits_backward:
        raise PlanError("this host computes weight gradients in the backward only", f"{len(split)} W at stage {stage}")
    if plan.limits.all_in_step:
        raise PlanError("ranks that run in step have weight gradients as passes of their own", f"stage {stage}")
    if sum(op.kind == "W" for op in plan.order[stage]) != len(split):
        raise PlanError("weight gradients of a micro-batch are computed twice", f"stage {stage}")
    for index in split:
        if place[Op("W", index)] < place.get(Op("B", index), len(place)):
            raise PlanError("weight gradients come before their backward", f"stage {stage}, micro-batch {index}")


def _slices_keep_their_prefix(plan: StepPlan) -> None:
    """Forward ascends, then backward descends at every stage, so KV and dKV live as long as they are needed."""
    if not plan.order or not (plan.cut or plan.backward):
        return
    forward, backward = _chains(plan, plan.passes("F")), _chains(plan, plan.passes("B"))
    pairs = _regrouped(plan)
    for stage, ops in enumerate(plan.order):
        place = {op: at for at, op in enumerate(ops)}
        for sequence, chain in forward.items():
            for earlier, later in itertools.pairwise(chain):
                if place[Op("F", earlier)] > place[Op("F", later)]:
                    detail = f"stage {stage}, sequence {sequence}: micro-batch {later} before {earlier}"
                    raise PlanError("a slice runs forward before its prefix", detail)
            back = backward[sequence]
            for earlier, later in itertools.pairwise(back):
                if place[Op("B", later)] > place[Op("B", earlier)]:
                    detail = f"stage {stage}, sequence {sequence}: micro-batch {earlier} before {later}"
                    raise PlanError("prefix KV is freed while a later slice still needs it", detail)
            if place[Op("B", back[-1])] < place[Op("F", chain[-1])]:
                detail = f"stage {stage}, sequence {sequence}: B{back[-1]} before F{chain[-1]}"
                raise PlanError("backward of a sequence starts before its forward has ended", detail)
        for index, other in pairs:
            if place[Op("B", other)] < place[Op("F", index)]:
                detail = f"B{other} before F{index}"
                raise PlanError("backward of a sequence starts before its forward has ended", detail)


def _chains(plan: StepPlan, micro_batches: tuple[MicroBatch, ...]) -> dict[int, list[int]]:
    """The micro-batches of each cut sequence by ascending slice."""
    chains: dict[int, list[tuple[int, int]]] = {}
    for index, micro_batch in enumerate(micro_batches):
        for s in micro_batch.slices:
            if s.sequence in plan.cut:
                chains.setdefault(s.sequence, []).append((s.start, index))
    return {sequence: [index for _, index in sorted(chain)] for sequence, chain in chains.items()}


def _regrouped(plan: StepPlan) -> set[tuple[int, int]]:
    """Forward and backward micro-batches, as pairs of numbers, that share a whole sequence in a plan of own groups."""
    if not plan.backward:
        return set()
    cp_group = {s.sequence: index for index, m in enumerate(plan.micro_batches) for s in m.slices}
    return {(cp_group[s.sequence], j) for j, m in enumerate(plan.backward) for s in m.slices}


def _links_keep_their_order(plan: StepPlan) -> None:
    """Every rank runs forwards in one order at all stages, and backwards too: links between stages are queues."""
    if len(plan.order) < 2:
        return
    stages = [orders_of_stage(plan, stage) for stage in range(len(plan.order))]
    for rank in range(plan.limits.num_ranks):
        for kind, word in (("F", "forwards"), ("B", "backwards")):
            rows = [[op for op in stage[rank] if op.kind == kind] for stage in stages]
            odd = next((s for s, row in enumerate(rows) if row != rows[0]), None)
            if odd is not None:
                raise PlanError(f"stages run {word} in different orders", f"rank {rank}, stages 0 and {odd}")


def _passes_meet(plan: StepPlan) -> None:
    """Run all ranks' lists against each other: a pass waits for its neighbour stage and for all ranks that share it."""
    if len(plan.order) > 1 or plan.shared:
        for _ in play(plan, lambda stage, op: 1.0):
            pass


def _offload_fits(plan: StepPlan) -> None:
    if plan.offload and (len(plan.offload) != len(plan.micro_batches) or not all(0 <= r <= 1 for r in plan.offload)):
        raise PlanError("offload does not give a share for every micro-batch", f"{plan.offload[:4]} ...")


def _recompute_fits(plan: StepPlan) -> None:
    if not plan.recompute:
        return
    limits = plan.limits
    shape = [len(row) for row in plan.recompute]
    if shape != [len(plan.micro_batches)] * limits.num_stages:
        detail = f"{len(shape)} stages of {sorted(set(shape))}"
        raise PlanError("recompute does not name every (stage, micro-batch)", detail)
    for stage, row in enumerate(plan.recompute):
        own = limits.at(stage).layers_per_stage
        for index, layers in enumerate(row):
            if not 0 <= layers <= own:
                detail = f"{layers} of {own} layers at stage {stage}, micro-batch {index}"
                raise PlanError("recompute names layers that do not exist", detail)


def _memory(plan: StepPlan) -> None:
    limits = plan.limits
    if limits.max_activation_bytes == float("inf"):
        return
    for stage in range(limits.num_stages):
        for rank, (peak, at) in enumerate(peaks_of_stage(plan, stage)):
            if peak > limits.max_activation_bytes:
                detail = f"{peak:.3g} bytes on rank {rank} of stage {stage} at {at.kind}{at.micro_batch}"
                cap = f"the cap is {limits.max_activation_bytes:.3g} bytes"
                do = f"{cap} (activation_gib): raise it, recompute more layers or run fewer in flight"
                raise PlanError("activations are over the memory cap", detail, do)


def check_policy(plan: StepPlan) -> None:
    """Raise PlanError unless the ranks of a group can follow the plan's policy of experts.

    Which experts a model has, plans do not know: quotas are held to laws of their own (`core.experts.quotas`).
    """
    policy, group = plan.experts, plan.limits.in_step
    if policy == EXPERTS_AT_HOME:
        return
    if group == 1:
        raise PlanError("experts are shared by ranks that do not run in step", f"the planner '{policy.planner}'")
    if policy.node_ranks and group % policy.node_ranks:
        raise PlanError("ranks of a node do not divide a group", f"{policy.node_ranks} of {group}")
    # Under ZeRO 3 several groups run in step, each with these copies.
    sizes = {len(copies) for copies in policy.copies if copies}
    if len(sizes) > 1 or any(group % size for size in sizes):
        raise PlanError("copies of experts are not said by rank", f"of {sorted(sizes)} ranks, {group} run in step")
    for layer, copies in enumerate(policy.copies):
        for rank, experts in enumerate(copies):
            if len(experts) > policy.slots:
                detail = f"layer {layer}, rank {rank}: {len(experts)}, slots {policy.slots}"
                raise PlanError("a rank has more copies of experts than slots", detail)
            if list(experts) != sorted(set(experts)):
                detail = f"layer {layer}, rank {rank}: {list(experts)}"
                raise PlanError("copies of experts are named twice or out of order", detail)
