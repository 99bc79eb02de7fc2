"""Lawful plans, broken at random: the laws accept exactly what a machine like the runtime's carries out.

The machine is written after what runs plans (`runtime.attention.prefix`, `stage_links`, `deferred`, `tape`, `plane`)
and has no code of the laws: ranks of stages that walk lists, queues between stages, a store of keys and values, graphs
that wait, weight gradients that are left.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from itertools import pairwise

from evenload.core.errors import PlanError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.order import in_slots
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from hypothesis import event, given, settings
from hypothesis import strategies as st

LAYERS = 2


class FaultError(Exception):
    """What ends the step of the machine."""


def require(fine, what):
    if not fine:
        raise FaultError(what)


class Store:
    """One sequence at one stage: tokens whose forward has run, those whose backward has not, and where they are."""

    def __init__(self, length):
        self.length, self.written, self.unsettled = length, 0, length
        self.cp_group: list[frozenset[int]] = []
        """The ranks of every token that has run forward."""


class Stage:
    """The ranks of a stage."""

    def __init__(self, plan, number):
        self.number, self.plan = number, plan
        self.rows: list[deque[Op]] = [deque() for _ in range(plan.limits.num_ranks)]
        for op in plan.order[number]:
            require(op.kind in ("F", "B", "W") and 0 <= op.micro_batch < len(plan.passes(op.kind)), "no such pass")
            for rank in plan.passes(op.kind)[op.micro_batch].ranks:
                self.rows[rank].append(op)
        self.stores = {i: Store(n) for i, n in enumerate(plan.lengths.tolist())}
        self.graphs: Counter[int] = Counter()
        self.left: Counter[int] = Counter()
        self.splits = {op.micro_batch for op in plan.order[number] if op.kind == "W"}

    def forward(self, op):
        m = self.plan.micro_batches[op.micro_batch]
        for s in m.slices:
            store = self.stores[s.sequence]
            require(s.start == store.written and store.unsettled == store.length, "a slice without its prefix")
            require(all(cp_group <= set(m.ranks) for cp_group in store.cp_group), "a prefix on another rank")
            store.written = s.stop
            store.cp_group += [frozenset(m.ranks)] * s.length
        self.graphs[op.micro_batch] += op.micro_batch in self.plan.kept

    def backward(self, op):
        m, stored_forward = self.plan.passes("B")[op.micro_batch], self.plan.forward_of[op.micro_batch]
        if stored_forward is not None:
            require(self.graphs[stored_forward] == 1, "a backward without a graph")
            self.graphs[stored_forward] -= 1
        for s in m.slices:
            store = self.stores[s.sequence]
            require(store.written == store.length and s.stop == store.unsettled, "a backward out of order")
            require(set(store.cp_group[s.start : s.stop]) == {frozenset(m.ranks)}, "a backward away from its tokens")
            store.unsettled = s.start
        self.left[op.micro_batch] += op.micro_batch in self.splits

    def weights(self, op):
        require(self.left[op.micro_batch] == 1, "weight gradients that nobody has left")
        self.left[op.micro_batch] -= 1

    def finish(self):
        stores = self.stores.values()
        require(all(store.unsettled == 0 for store in stores), "a sequence without its gradients")
        require(not any(self.graphs.values()) and not any(self.left.values()), "something is left over")


def carry_out(plan):
    """Raise FaultError where the step cannot be carried out."""
    _refuse_nonsense(plan)
    stages = [Stage(plan, number) for number in range(plan.limits.num_stages)]
    queues = {}
    while _turn(plan, stages, queues):
        pass
    require(not any(row for stage in stages for row in stage.rows), "a deadlock")
    require(not any(queues.values()), "tensors that nobody takes")
    for stage in stages:
        stage.finish()


def _refuse_nonsense(plan):
    ranks, count = set(range(plan.limits.num_ranks)), len(plan.passes("B"))
    for m in (*plan.micro_batches, *plan.backward):
        require(bool(m.ranks) and set(m.ranks) <= ranks and len(set(m.ranks)) == len(m.ranks), "no such rank")
        require(m.cp_comm == "ring" or (m.cp_comm == "" and len(m.ranks) == 1), "no such engine")
        require(
            len(m.cp_groups) in (0, len(m.slices)) and all(set(h) <= set(m.ranks) for h in m.cp_groups), "no such home"
        )
        require(
            not m.cp_groups or {rank for cp_group in m.cp_groups for rank in cp_group} == set(m.ranks),
            "ranks without a token",
        )
        require(len({s.sequence for s in m.slices}) == len(m.slices), "one prefix for two slices")
        require(all(0 <= s.sequence < len(plan.lengths) and s.start < s.stop for s in m.slices), "no such tokens")
    require(len(plan.order) == plan.limits.num_stages, "no such stage")
    require(list(plan.replayed) == [j for j in range(count) if j in plan.replayed], "no such replay")
    for rows, sign in ((plan.micro_batches, 1), (plan.backward, -1)):
        starts = [(s.sequence, sign * s.start) for m in rows for s in m.slices]
        require(sorted(starts) == sorted(starts, key=lambda one: one[0]), "numbers that are no launch order")
    alone = {j for j, stored_forward in enumerate(plan.forward_of) if stored_forward is None} - set(plan.replayed)
    require(not alone, "a backward of no forward")
    require(not (plan.backward and plan.recompute), "nobody says which layers of which forward")
    shape = [len(row) for row in plan.recompute]
    require(not shape or shape == [len(plan.micro_batches)] * plan.limits.num_stages, "layers of other passes")
    require(all(0 <= n <= LAYERS for row in plan.recompute for n in row), "no such layers")


def _turn(plan, stages, queues):
    """Every rank that can runs its next pass; False where none can."""
    moved = False
    for stage in stages:
        for row in stage.rows:
            if not row:
                continue
            op = row[0]
            ahead = {"F": 1, "B": -1, "W": 0}[op.kind]
            members = plan.passes(op.kind)[op.micro_batch].ranks
            if any(not stage.rows[rank] or stage.rows[rank][0] != op for rank in members):
                continue
            source, target = stage.number - ahead, stage.number + ahead
            if ahead and 0 <= source < len(stages):
                arrived = [queues.get((op.kind, stage.number, rank)) for rank in members]
                if not all(arrived):
                    continue
                for queue in arrived:
                    require(
                        queue is not None and queue.popleft() == op, "a pass takes the tensor of another micro-batch"
                    )
            {"F": stage.forward, "B": stage.backward, "W": stage.weights}[op.kind](op)
            for rank in members:
                stage.rows[rank].popleft()
                if ahead and 0 <= target < len(stages):
                    queues.setdefault((op.kind, target, rank), deque()).append(op)
            moved = True
    return moved


@st.composite
def lawful(draw):
    """Sequences in slices on one rank or on a ring, one list of all ranks a stage; sometimes W, replays, regrouped."""
    ranks, stages = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(8, 24), min_size=1, max_size=4))
    limits = Limits(ranks, 1 << 20, num_stages=stages, layers_per_stage=LAYERS, splits_backward=True)
    size = draw(st.integers(8, 24))
    micro_batches = []
    for index, n in enumerate(lengths):
        first = draw(st.integers(0, ranks - 1))
        cp_group = tuple(range(ranks)) if ranks > 1 and draw(st.integers(0, 3)) == 0 else (first,)
        bounds = [*range(0, n - 7, size), n] if n >= 16 else [0, n]
        for start, stop in pairwise(bounds):
            micro_batches.append(
                MicroBatch((Slice(index, start, stop),), cp_group, cp_comm="ring" if cp_group[1:] else "")
            )
    plan = StepPlan(as_lengths(lengths), tuple(micro_batches), limits)
    count = len(micro_batches)
    last = {s.sequence: i for i, m in enumerate(micro_batches) for s in m.slices}
    need = [1 + last[m.slices[0].sequence] for m in micro_batches]
    backs = sorted(range(count), key=lambda i: (need[i], -i))
    rows = [in_slots(range(count), backs, [need[i] for i in backs], stages - 1 - stage) for stage in range(stages)]
    if draw(st.booleans()):
        split = draw(st.sets(st.integers(0, count - 1)))
        rows = [[*row, *(Op("W", i) for i in sorted(split))] for row in rows]
    if draw(st.booleans()):
        layers = st.integers(0, LAYERS)
        of_stage = st.lists(layers, min_size=count, max_size=count).map(tuple)
        plan = replace(plan, recompute=tuple(draw(of_stage) for _ in range(stages)))
    elif draw(st.booleans()):
        plan = replace(plan, replayed=tuple(sorted(draw(st.sets(st.integers(0, count - 1))))))
    elif not plan.shared and draw(st.booleans()):
        return _regrouped(draw, plan)
    return replace(plan, order=tuple(map(tuple, rows)))


def _regrouped(draw, plan):
    """The same with groups of its own in the backward pass, all of them replayed but for those that are alike."""
    cp_group = {s.sequence: m.ranks for m in plan.micro_batches for s in m.slices}
    groups = []
    for index, n in enumerate(plan.lengths.tolist()):
        cut = draw(st.integers(1, n))
        bounds = [(cut, n), (0, cut)] if cut < n else [(0, n)]
        groups += [MicroBatch((Slice(index, *pair),), cp_group[index]) for pair in bounds]
    replayed = tuple(j for j, m in enumerate(groups) if m not in plan.micro_batches)
    passes = [*(Op("F", i) for i in range(len(plan.micro_batches))), *(Op("B", j) for j in range(len(groups)))]
    order = (tuple(passes),) * plan.limits.num_stages
    return replace(plan, backward=tuple(groups), replayed=replayed, order=order)


def _at(draw, row):
    return draw(st.integers(0, len(row) - 1))


def _with(row, at, *new):
    """The row with other entries in one place."""
    return (*row[:at], *new, *row[at + 1 :])


def _order(draw, plan):
    stage = _at(draw, plan.order)
    ops = plan.order[stage] or (Op("F", 0),)
    at, to = _at(draw, ops), _at(draw, ops)
    number = draw(st.integers(-1, len(plan.micro_batches)))
    without = (*ops[:at], *ops[at + 1 :])
    way = draw(st.sampled_from(["move", "swap", "drop", "twice", "kind", "number", "stage"]))
    changed = {
        "move": (*without[:to], ops[at], *without[to:]),
        "swap": _with(_with(ops, at, ops[to]), to, ops[at]),
        "drop": without,
        "twice": (*ops[:to], ops[at], *ops[to:]),
        "kind": _with(ops, at, Op(draw(st.sampled_from(["F", "B", "W"])), ops[at].micro_batch)),
        "number": _with(ops, at, ops[at]._replace(micro_batch=number)),
        "stage": plan.order[_at(draw, plan.order)],
    }
    return replace(plan, order=_with(plan.order, stage, changed[way]))


def _groups(draw, plan):
    rows = plan.micro_batches
    at, to = _at(draw, rows), _at(draw, rows)
    m, step = rows[at], draw(st.sampled_from([-1, 1]))
    rank = draw(st.integers(-1, plan.limits.num_ranks))
    slices = st.sampled_from([_with(m.slices, 0, s) for s in _near(m.slices[0], step)] if m.slices else [()])
    changed = {
        "ranks": _with(rows, at, m._replace(ranks=(rank,))),
        "one more": _with(rows, at, m._replace(ranks=(*m.ranks, rank), cp_comm="ring")),
        "slice": _with(rows, at, m._replace(slices=draw(slices))),
        "both": _with(rows, at, m._replace(slices=m.slices + rows[to].slices)),
        "empty": _with(rows, at, m._replace(slices=())),
        "engine": _with(rows, at, m._replace(cp_comm="tree")),
        "home": _with(rows, at, m._replace(cp_groups=((max(0, rank),),))),
        "away": _with(rows, at, m._replace(ranks=(max(0, rank),), cp_groups=(m.ranks,))),
        "swap": _with(_with(rows, at, rows[to]), to, m),
    }
    return replace(plan, micro_batches=changed[draw(st.sampled_from(sorted(changed)))])


def _near(s, step):
    return [s._replace(start=s.start + step), s._replace(stop=s.stop + step), s._replace(sequence=s.sequence + step)]


def _rest(draw, plan):
    some = tuple(draw(st.lists(st.integers(-1, len(plan.micro_batches)), max_size=3)))
    rows = plan.recompute or ((0,) * len(plan.micro_batches),) * plan.limits.num_stages
    row = _with(rows[0], _at(draw, rows[0]), draw(st.integers(-1, LAYERS + 1)))
    changed = {
        "replayed": replace(plan, replayed=some),
        "recompute": replace(plan, recompute=_with(rows, 0, row)),
        "fewer": replace(plan, recompute=rows[1:]),
        "backward": replace(plan, backward=plan.passes("B")[::-1]),
        "kept": replace(plan, backward=_with(plan.passes("B"), 0, plan.micro_batches[-1])),
        "stages": replace(plan, order=(*plan.order, plan.order[0])),
    }
    return changed[draw(st.sampled_from(sorted(changed)))]


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_laws_accept_what_can_be_carried_out_and_nothing_else(data):
    plan = data.draw(lawful())
    carry_out(check(plan))
    draw = data.draw
    for _ in range(draw(st.integers(1, 2))):
        plan = draw(st.sampled_from([_order, _order, _groups, _rest]))(draw, plan)
    try:
        carry_out(plan)
        fault = ""
    except FaultError as error:
        fault = str(error)
    try:
        check(plan)
        broken = ""
    except PlanError as error:
        broken = error.what
    event(f"{fault or 'fine'}: {broken or 'accepted'}")
    assert bool(fault) == bool(broken), f"{fault or 'fine'}: {broken or 'accepted'}"
