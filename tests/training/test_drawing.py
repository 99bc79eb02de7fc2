"""Global batches with a queue: every sample exactly once, never late, resumed bit for bit."""

import json
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.planner import Planner
from evenload.core.recipe.recipe import parse
from evenload.data.samples.order import BatchSize, SampleOrder
from evenload.training.drawing import Drawing, num_waiting
from hypothesis import given
from hypothesis import strategies as st

SIZE, CAP = 8, 2048
EIGHT = BatchSize(SIZE)


def chain(delay, ranks=4, enabled=True):
    packing = {"enabled": enabled, "max_tokens": CAP, "max_delay_steps": delay}
    recipe = parse({"parallel": {"dp": ranks}, "plugins": {"packing": packing}})
    return PlanChain.of_recipe(recipe, recipe.layout())


def heavy_tail(count, seed=0):
    lengths = np.random.default_rng(seed).lognormal(4, 1.2, count)
    return np.clip(lengths, 2, CAP).astype(np.int64)


def drawing(lengths, made, seed=5):
    return Drawing(None, lengths, EIGHT, made, seed=seed)


def same(one, other):
    return one.samples.tolist() == other.samples.tolist() and (one.lengths == other.lengths).all()


@given(st.integers(0, 99), st.integers(1, 6), st.integers(2, 5), st.integers(20, 61))
def test_every_sample_runs_once_and_never_later_than_allowed(seed, delay, ranks, count):
    """Over three epochs, whose ends the queue crosses."""
    lengths = heavy_tail(count, seed)
    draw, order = drawing(lengths, chain(delay, ranks)), SampleOrder(count, 5)
    drawn_at, runs, step = defaultdict(list), Counter(), 0
    while order.epoch < 3:
        taken, order = order.take(SIZE)
        for sample in taken.tolist():
            drawn_at[sample].append(step)
        got = draw()
        assert len(got.samples)
        waited = []
        for sample in got.samples.tolist():
            waited.append(step - drawn_at[sample][runs[sample]])
            runs[sample] += 1
        assert 0 <= min(waited) <= max(waited) <= delay
        assert got.delay_steps == pytest.approx(np.average(waited, weights=got.lengths))
        assert waited == sorted(waited, reverse=True), "the oldest first"
        step += 1
    left = Counter(got.state["waiting"]["samples"])
    assert num_waiting(got.state) == left.total()
    assert runs + left == Counter(dict.fromkeys(range(count), 3))


def test_something_waits_on_these_lengths():
    """Or the law above would hold of nothing."""
    draw = drawing(heavy_tail(400), chain(3))
    rows = [draw() for _ in range(40)]
    assert sum(num_waiting(row.state) > 0 for row in rows) > 10
    assert {len(row.samples) for row in rows} > {SIZE - 1, SIZE + 1}


@pytest.mark.parametrize("made", [chain(0), chain(3, enabled=False)], ids=["no delay", "no plugin"])
def test_off_means_the_batches_of_the_order_alone(made):
    lengths = heavy_tail(100)
    draw, order = drawing(lengths, made), SampleOrder(100, 5)
    for _ in range(30):
        samples, order = order.take(SIZE)
        got = draw()
        assert got.samples.tolist() == samples.tolist()
        assert got.state == order.state()
        assert got.delay_steps == 0.0
        assert draw.num_ranks is None


@pytest.mark.parametrize("ranks", [4, 2, 7])
def test_a_resumed_run_draws_the_same_batches_on_any_number_of_ranks(ranks):
    lengths = heavy_tail(300)
    draw = drawing(lengths, chain(3))
    rows = [draw() for _ in range(60)]
    waiting = [k for k, row in enumerate(rows[:40]) if num_waiting(row.state)]
    assert len(waiting) > 5
    for k in [*waiting[:4], 0, 30]:
        state = json.loads(json.dumps(rows[k].state))
        again = Drawing(state, lengths, EIGHT, chain(3, ranks))
        assert again.num_ranks == 4
        for row in rows[k + 1 :]:
            got = again()
            assert same(got, row)
            assert got.state == row.state


@pytest.mark.parametrize("made", [chain(0), chain(3, enabled=False)], ids=["no delay", "no plugin"])
def test_waiting_samples_run_first_when_the_delay_is_switched_off(made):
    lengths = heavy_tail(300)
    draw = drawing(lengths, chain(3))
    state = next(row.state for row in iter(draw, None) if num_waiting(row.state) > 1)
    again = Drawing(state, lengths, EIGHT, made)
    got = again()
    assert got.samples.tolist()[: -SIZE or None] == state["waiting"]["samples"]
    assert num_waiting(got.state) == 0
    assert len(again().samples) == SIZE


def test_a_shorter_delay_makes_the_old_ones_due():
    lengths = heavy_tail(300)
    draw = drawing(lengths, chain(6))
    state = next(row.state for row in iter(draw, None) if max(row.state["waiting"]["steps"], default=0) > 3)
    got = Drawing(state, lengths, EIGHT, chain(2))()
    assert set(state["waiting"]["samples"]) <= set(got.samples.tolist())


@pytest.mark.parametrize(
    "queue",
    [
        {"samples": [3], "steps": [1, 2], "ranks": 4},
        {"samples": [300], "steps": [1], "ranks": 4},
        {"samples": [3], "steps": [1]},
        {"samples": ["x"], "steps": [1], "ranks": 4},
        {"samples": [3], "steps": [1], "ranks": 0},
        None,
    ],
)
def test_a_damaged_queue_is_refused(queue):
    state = {**SampleOrder(300, 5).state(), "waiting": queue}
    with pytest.raises(EvenloadError, match="queue of waiting samples is damaged"):
        Drawing(state, heavy_tail(300), EIGHT, chain(3))


def test_the_simpler_plan_takes_the_same_batches(caplog):
    """A planner that fails changes who computes what, not what is drawn or held back."""

    def fails(*_):
        raise ZeroDivisionError("inside a planner")

    lengths, made = heavy_tail(300), chain(3)
    ((plugin, config),) = made.links
    broken = replace(made, links=((replace(plugin, plan=fails), config),))
    planner = Planner(broken, drawing(lengths, broken), background=False)
    want, waited = drawing(lengths, made), 0
    for _ in range(12):
        planned, expected = planner.next(), want()
        assert planned.plan.made_by == "chunks"
        assert same(planned.draw, expected)
        assert planned.plan.lengths.tolist() == expected.lengths.tolist()
        waited += num_waiting(planned.draw.state)
    assert waited


def test_ranks_that_draw_ahead_keep_each_steps_own_state():
    """The planner draws one step ahead; the state of the step that runs must not know of it."""
    lengths, made = heavy_tail(300), chain(3)
    ahead = Planner(made, drawing(lengths, made), background=True)
    want = drawing(lengths, made)
    assert [ahead.next().draw.state for _ in range(10)] == [want().state for _ in range(10)]


@pytest.mark.parametrize("made", [chain(0), chain(3)], ids=["no delay", "delay"])
def test_samples_without_target_are_drawn_in_their_turn_left_out_and_counted(made):
    """The batches are those of data in which every sample has one, less what has none; a resumed run agrees."""
    lengths = heavy_tail(90)
    targets = lengths - 1
    targets[::3] = 0
    draw = Drawing(None, lengths, EIGHT, made, seed=5, targets=targets)
    rows = [draw() for _ in range(24)]
    runs = Counter()
    for row, drawn in zip(rows, taken(24), strict=True):
        assert row.without_target == (targets[drawn] == 0).sum()
        assert row.targets.all()
        assert row.targets.tolist() == targets[row.samples].tolist()
        runs.update(row.samples.tolist())
    drawn_often = Counter(sample for drawn in taken(24) for sample in drawn.tolist() if targets[sample])
    assert runs + Counter(waiting_of(rows[-1])) == drawn_often
    again = Drawing(json.loads(json.dumps(rows[9].state)), lengths, EIGHT, made, targets=targets)
    assert all(same(again(), row) for row in rows[10:])


def taken(steps):
    order, batches = SampleOrder(90, 5), []
    for _ in range(steps):
        batch, order = order.take(SIZE)
        batches.append(batch)
    return batches


def waiting_of(row):
    return row.state.get("waiting", {"samples": []})["samples"]


def test_a_batch_without_any_target_ends_the_job_when_its_turn_comes():
    """Planned ahead, it does not end the step before it."""
    lengths, made = heavy_tail(90), chain(0)
    targets = lengths - 1
    targets[taken(3)[2]] = 0
    planner = Planner(made, Drawing(None, lengths, EIGHT, made, seed=5, targets=targets), background=True)
    assert [len(planner.next().draw.samples) for _ in range(2)] == [SIZE, SIZE]
    with pytest.raises(EvenloadError, match=f"has a target\n.*step 2: {SIZE} samples"):
        planner.next()
