"""The judge: which candidate runs, what a plan comes to is kept, and no plan is slower than a lawful row."""

import math
from dataclasses import replace

import pytest
from evenload.core.errors import EvenloadError, PlanError
from evenload.core.laws import check
from evenload.core.plan.step_plan import Op, as_lengths
from evenload.core.planning import judge as judging
from evenload.core.planning.judge import (
    FASTEST,
    Candidate,
    Preference,
    beside,
    best,
    fastest,
    floor_s,
    judge,
    judged,
    least_s,
    outcome_of,
    rivals_of,
)
from evenload.core.planning.setting import MOST_PASSES
from evenload.core.simulate.step import after_passes_s, simulate
from evenload.training.forecast.forecast import Simulated, over_caps
from hypothesis import given, settings
from hypothesis import strategies as st

from ..by_hand import chain_of


def chain(plugins, *, cluster="h100", train=None, **parallel):
    return chain_of(plugins, parallel={"dp": 2, **parallel}, cluster=cluster, train=train or {})


SOME = chain({"packing": {"max_tokens": 400}})
PLAN = SOME.plan(as_lengths([300, 200, 90, 7]))


def candidate(step_s, missing=-1.0, peak=1.0, baseline=""):
    return Candidate(PLAN, step_s, peak, missing, 0.0, baseline)


def test_the_fastest_that_fits_runs():
    slow, quick, large = candidate(3.0), candidate(2.0), candidate(1.0, missing=5.0)
    assert best([slow, quick, large]) is quick
    assert best([]) is None


def test_where_none_fits_the_smallest_runs_or_the_fastest():
    small, quick = candidate(3.0, missing=1.0), candidate(2.0, missing=2.0)
    assert best([quick, small]) is small
    assert best([quick, small], unfit=fastest) is quick


def test_a_preference_is_worth_its_slack_and_no_more():
    smaller = Preference(slack=0.1, key=lambda one: one.peak_bytes)
    quick, small, slow = candidate(1.0, peak=3.0), candidate(1.09, peak=2.0), candidate(1.2, peak=1.0)
    assert best([quick, small, slow], (smaller,)) is small


def test_no_preference_picks_what_is_slower_than_a_baseline():
    smaller = Preference(slack=0.1, key=lambda one: one.peak_bytes)
    quick, small = candidate(1.0, peak=3.0), candidate(1.09, peak=2.0)
    other = candidate(1.05, peak=4.0, baseline="whole")
    assert best([quick, small, other], (smaller,)) is quick
    assert best([small, other], (smaller,)) is other


def test_a_preference_that_is_about_no_candidate_leaves_it_to_the_next():
    nobody = Preference(slack=1.0, among=lambda one: False)
    assert best([candidate(2.0), quick := candidate(1.0)], (nobody, FASTEST)) is quick


def test_a_plan_is_simulated_once_and_its_caps_change_nothing(monkeypatch):
    played = []

    def counting(plan, *arguments, **options):
        played.append(plan)
        return simulate(plan, *arguments, **options)

    monkeypatch.setattr(judging, "simulate", counting)
    plan = replace(PLAN)
    first = outcome_of(plan, SOME.context)
    capped = plan.revised(limits=replace(plan.limits, max_tokens=401), notes=("another",))
    assert outcome_of(capped, SOME.context) is first
    assert len(played) == 1
    reversed_ = plan.revised(micro_batches=plan.micro_batches[::-1])
    assert outcome_of(reversed_, SOME.context) is not first
    outcome_of(plan, replace(SOME.context))  # another context asks anew
    assert len(played) == 3


def test_what_a_plan_was_chosen_beside_is_forgotten_with_its_micro_batches():
    plan = beside(replace(PLAN), ["packing.whole"])
    assert rivals_of(plan.revised(notes=())) == {"packing.whole"}
    assert rivals_of(plan.revised(micro_batches=plan.micro_batches[::-1])) == frozenset()


def test_plans_whose_ranks_would_wait_for_each_other_are_no_candidates():
    staged = chain({"packing": {"max_tokens": 400}}, dp=1, pp=2)
    plan = staged.plan(as_lengths([300, 200]))
    forward, backward = ([Op(kind, i) for i in range(len(plan.micro_batches))] for kind in ("F", "B"))
    circle = plan.revised(order=((*backward, *forward), (*forward, *backward)))
    with pytest.raises(PlanError, match="deadlocks"):
        judge(circle, staged.context)
    assert [one.plan for one in judged([circle, plan], staged.context)] == [plan]


def test_a_plan_that_takes_no_less_than_one_that_fits_is_not_played(monkeypatch):
    of, batch = chain({"mesh": {"max_tokens": 4000}}, dp=2), as_lengths([900, 800, 100])
    fast, slow = (of.baseline(name, batch) for name in ("cp_1", "stock"))
    assert outcome_of(fast, of.context).step_s < floor_s(slow, of.context)
    known = judged([fast], of.context)
    assert [one.plan for one in known] == [fast]
    assert judged([slow], of.context, known) == []
    assert [one.plan for one in judged([slow, fast, slow], of.context)] == [slow, fast], "bars fall on the way"
    over = [known[0]._replace(missing_bytes=1.0)]
    assert [one.plan for one in judged([slow], of.context, over)] == [slow], "what does not fit is no bar"


def test_a_floor_counts_communication_that_nothing_hides():
    of = chain({"mesh": {"max_tokens": 4000}}, dp=2)
    shared = of.baseline("cp_all", as_lengths([900, 800, 100]))
    outcome = outcome_of(shared, of.context)
    assert outcome.exposed_s.max() > 0
    assert floor_s(shared, of.context) == pytest.approx(outcome.step_s, rel=1e-9), "one pass after the other"


LENGTHS = st.lists(st.integers(2, 4000), min_size=2, max_size=40)
SECTION = {
    "packing": st.fixed_dictionaries(
        {"max_tokens": st.sampled_from([500, 2000, 4000]), "slices": st.sampled_from(["auto", "even", "off"])}
    ),
    "mesh": st.fixed_dictionaries(
        {"max_tokens": st.sampled_from([700, 4000]), "engines": st.sampled_from([["ring"], ["ring", "all_to_all"]])},
        optional={"max_degree": st.sampled_from([1, 2])},
    ),
    "pipeline": st.fixed_dictionaries(
        {"max_tokens": st.sampled_from([600, 4000])}, optional={"chunks": st.sampled_from([1, 4])}
    ),
}


@st.composite
def asked(draw):
    names = draw(st.sets(st.sampled_from(sorted(SECTION)), min_size=1))
    sections = {name: draw(SECTION[name]) for name in sorted(names)}
    cluster = draw(st.sampled_from(["h100", "flexsp-a100"]))
    train = {"recompute": draw(st.booleans())}
    dp, pp = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 1, 2, 4]))
    return chain(sections, cluster=cluster, train=train, dp=dp, pp=pp)


@settings(max_examples=settings.default.max_examples // 2)
@given(asked(), LENGTHS)
def test_no_plan_is_slower_than_a_lawful_row_of_its_table(of, lengths):
    batch = as_lengths(lengths)
    try:
        ours = of.plan(batch)
    except EvenloadError:
        return  # no plan, and no table
    check(ours)
    plan = Simulated(ours, outcome_of(ours, of.context))
    for name in of.rivals.names:
        try:
            other = of.baseline(name, batch)
        except EvenloadError:
            continue
        row = Simulated(other, outcome_of(other, of.context))
        assert floor_s(other, of.context) <= row.outcome.step_s * (1 + 1e-9), name
        if not of.rivals.breaks(name, other) and over_caps(row, plan, of.context) is None:
            offer = of.rivals.offer(name)
            keeps = offer[0].baselines.rows[name].keeps if offer else "whole"
            assert least_s(keeps, batch, ours.limits, of.context) <= row.outcome.step_s * (1 + 1e-9), name
            assert plan.outcome.step_s <= row.outcome.step_s * (1 + 1e-9), name


def test_baselines_that_cannot_win_are_not_planned():
    """One sequence of most tokens bounds whatever keeps it on a rank, or is longer than a micro-batch may be."""
    made = chain({"packing": {"max_tokens": 9000}, "mesh": {}}, dp=8)
    batch = as_lengths([60000, *range(20, 60)])
    planned = []

    def noted(name, baseline):
        return replace(baseline, plan=lambda *step: (planned.append(name), baseline.plan(*step))[1])

    links = tuple(
        (replace(p, baselines=replace(p.baselines, rows={n: noted(n, row) for n, row in p.baselines.rows.items()})), c)
        for p, c in made.links
    )
    assert replace(made, links=links).plan(batch).digest == made.plan(batch).digest
    assert not {"chunks", "cp_1", "whole", "best_fit", "in_order"} & set(planned)
    assert "cp_all" in planned


def test_a_gradient_sum_that_is_not_hidden_counts_as_next_to_the_bound_of_a_large_batch(monkeypatch):
    context = SOME.context
    outcome = outcome_of(PLAN, context)
    bound = PLAN.revised(bound_s=outcome.passes_s / 1.0005)
    late = replace(outcome, step_s=1.005 * outcome.passes_s + after_passes_s(context))
    for sequences, step, near in (
        (0, late, True),
        (1 << 14, late, False),
        (0, replace(late, step_s=2.0 * late.step_s), False),
    ):
        monkeypatch.setattr(judging, "SMALL", sequences)
        monkeypatch.setattr(judging, "outcome_of", lambda *_, step=step: step)
        assert judging.at_bound(bound, context) is near


def test_a_batch_of_endless_micro_batches_is_refused_at_once():
    of = chain({"packing": {"max_tokens": 16}}, pp=4)
    most = MOST_PASSES * 16 // 4
    with pytest.raises(EvenloadError, match="too many micro-batches") as refusal:
        of.plan(as_lengths([most // 2, most]))
    assert "max_tokens" in refusal.value.do
    assert math.isfinite(outcome_of(of.plan(as_lengths([160, 16])), of.context).step_s)
