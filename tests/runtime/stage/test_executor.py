"""The executor does what the program says and nothing else, with a trainer that writes down what it is asked to do."""

from types import SimpleNamespace

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.forwards import lower_forwards
from evenload.core.plan.order import orders_of_stage
from evenload.core.plan.program import lower
from evenload.core.plan.step_plan import Op
from evenload.core.simulate.one_queue import send_turns
from evenload.runtime.measure.busy import BusyClock
from evenload.runtime.stage.deferred import WgradStore
from evenload.runtime.stage.executor import Executor, StageTrainer
from evenload.runtime.stage.tape import Tape
from harness.proof.drawn import random_plan
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")


def inputs(micro_batch):
    """A stage's input that names every token: [1, T, 2], zeros in a dummy and on padding."""
    rows = []
    for s in micro_batch.slices:
        rows += [(s.sequence + 1.0, float(t)) for t in range(s.start, s.stop)]
        rows += [(0.0, 0.0)] * (max(s.length, micro_batch.pad_to) - s.length)
    return torch.tensor(rows or [(0.0, 0.0)])[None]


class Trainer(StageTrainer):
    """Writes down what runs and computes nothing."""

    def __init__(self, done, first):
        super().__init__([], CPU)
        self.done, self._first, self.weight = done, first, torch.ones(2, requires_grad=True)

    def load(self, micro_batch, prefix):
        widths = [max(s.length, micro_batch.pad_to) for s in micro_batch.slices] or [1]
        segments = (0, *torch.tensor(widths).cumsum(0).tolist())
        pack = SimpleNamespace(slices=micro_batch.slices, segments=segments, num_padded_tokens=segments[-1])
        return SimpleNamespace(pack=pack, micro_batch=micro_batch)

    def forward(self, loaded, received, action):
        assert torch.is_grad_enabled() == (action.kind not in ("forward_kv", "score"))
        assert (received is None) == self._first
        if received is not None:
            assert torch.equal(received.detach(), inputs(loaded.micro_batch))
        self.done.append((action.kind, action.op, loaded.micro_batch))
        return inputs(loaded.micro_batch) * self.weight

    def backward(self, graph, gradient):
        self.done.append(("backward", Op("B", -1), graph.loaded.micro_batch))
        return None if graph.received is None else torch.zeros_like(graph.received)

    def empty_like_input(self, pack):
        return torch.empty(1, pack.num_padded_tokens, 2)


class Links:
    """What would go to and come from the neighbours."""

    def __init__(self, plan, done, one_queue=False):
        self.plan, self.done, self.one_queue = plan, done, one_queue

    def begin(self, *, holds):
        self.done.clear()
        self.waited = []
        self.holds = holds

    def mark(self, where):
        self.done.append(("mark", Op("F", -1), None))

    def turn(self, kind):
        self.done.append(("turn", Op(kind, -1), None))

    def wait_for_sends(self, most):
        self.waited.append(most)

    def finish(self):
        pass

    def send(self, op, tensor):
        assert tensor.shape == inputs(self.plan.passes(op.kind)[op.micro_batch]).shape
        self.done.append(("send", op, None))

    def receive(self, op, like, taken):
        self.done.append(("receive", op, None))
        return like.copy_(inputs(self.plan.passes(op.kind)[op.micro_batch]))


def executor_of(*arguments, links, mark=lambda _: None):
    return Executor(*arguments, links=links, plane=None, clock=BusyClock(CPU), mark=mark)


def carried_out(plan, stage, rank, program=None):
    """What a run of a program does, in order: kind, pass and micro-batch."""
    done = []
    trainer = Trainer(done, stage == 0)
    links = Links(plan, done) if plan.limits.num_stages > 1 else None
    program = lower(plan, stage, rank) if program is None else program
    executor = executor_of(plan, stage, rank, program, trainer, links=links)
    write, run = Tape.write, WgradStore.run

    def writing(*args):
        done.append(("keep_input", Op("F", -1), None))
        write(trainer.tape, *args)

    def running(number):
        done.append(("weight_grads", Op("W", number), None))
        run(executor.wgrads, number)

    trainer.tape.write, executor.wgrads.run = writing, running
    executor.run()
    assert executor.executed == [s for kind, _, m in done if kind in ("backward", "score") for s in m.slices]
    return done


def wanted(program):
    """What a program says, as `carried_out` writes it down."""
    rows = []
    for action in program:
        op = {"backward": Op("B", -1), "keep_input": Op("F", -1)}.get(action.kind, action.op)
        rows.append((action.kind, op, action.micro_batch if action.computes and op.kind != "W" else None))
    return rows


@given(st.integers(0, 10**6), st.lists(st.integers(1, 40), min_size=1, max_size=6), st.booleans())
def test_what_a_program_says_is_done_and_nothing_else(seed, lengths, pad):
    for stages in (1, 2, 3):
        plan = random_plan(seed, lengths, num_ranks=2, num_stages=stages, layers_per_stage=2, pad=pad)
        for stage in range(stages):
            for rank in range(2):
                assert carried_out(plan, stage, rank) == wanted(lower(plan, stage, rank))


def test_dummies_run_as_the_program_has_them():
    plan = random_plan(3, [5, 9, 4], num_ranks=2, num_stages=1, layers_per_stage=2, idle=(1,))
    for dummies in ("idle", "in step"):
        program = lower(plan, 0, 1, dummies)
        assert program
        assert carried_out(plan, 0, 1, program) == wanted(program)


def test_an_input_that_nobody_takes_is_an_error():
    plan = random_plan(
        1, [12, 7], num_ranks=1, num_stages=2, layers_per_stage=2, replay="all", asymmetric=False, recompute=False
    )
    cut_short = tuple(a for a in lower(plan, 1, 0) if a.op.kind == "F")
    with pytest.raises(EvenloadError, match="stage inputs are left over"):
        carried_out(plan, 1, 0, cut_short)


def test_scores_run_without_gradients_and_hand_on():
    for stages in (1, 3):
        plan = random_plan(5, [30, 4, 17, 9], num_ranks=2, num_stages=stages, layers_per_stage=2)
        for stage in range(stages):
            for rank in range(2):
                program = lower_forwards(plan, stage, rank)
                assert carried_out(plan, stage, rank, program) == wanted(program)
                assert [a.op for a in program if a.kind == "score"] == [
                    op for op in orders_of_stage(plan, stage)[rank] if op.kind == "F"
                ]


def test_what_was_sent_forward_is_waited_for_where_no_backward_follows():
    plan = random_plan(5, [30, 4, 17, 9], num_ranks=1, num_stages=2, layers_per_stage=2)
    program = lower_forwards(plan, 0, 0)
    done = []
    links = Links(plan, done)
    executor_of(plan, 0, 0, program, Trainer(done, True), links=links).run()
    assert links.waited == [1] * len(plan.micro_batches)


def test_sends_wait_for_their_turn_where_a_device_has_one_queue():
    plan = random_plan(5, [30, 4, 17, 9], num_ranks=1, num_stages=2, layers_per_stage=2)
    trained, scored = lower(plan, 0, 0), lower_forwards(plan, 0, 0)
    turns = send_turns(plan, 0, 0)
    row = [(0, op) for op in orders_of_stage(plan, 0)[0]]
    for one_queue, program in ((True, trained), (False, trained), (True, scored)):
        done = []
        links = Links(plan, done, one_queue)
        executor_of(plan, 0, 0, program, Trainer(done, True), links=links, mark=links.mark).run()
        assert links.holds == (one_queue and program is trained)
        if program is trained:
            due = [verb for staged in (*row, None) for verb in (*("turn",) * len(turns.get(staged, ())), "mark")]
            wanted = due if one_queue else ["mark"] * (len(row) + 1)
            assert [verb for verb, _, _ in done if verb in ("turn", "mark")] == wanted
