"""Plans of samples that begin alike: each once, counted by what it computes in its place, and no slower than rows."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.plan.trie import WORTH, trie_of
from evenload.core.planning import trees
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import judge
from evenload.core.planning.stages import PlanStages
from evenload.core.planning.trees import Branch, plan_shared, plan_trees
from hypothesis import given
from hypothesis import strategies as st

from ..by_hand import chain_of

MODEL = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8}
ROUNDING = 1e-4
"""Of a causal block, n * n / 2 pairs or n * (n + 1) / 2."""
Groups = list[tuple[int, list[int]]]
"""Of each tree, the tokens of its trunk and those that each of its samples adds."""


@cache
def chain(ranks: int = 2, cap: int = 4096) -> PlanChain:
    sections = {"packing": {"slices": "off", "max_tokens": cap}}
    return chain_of(sections, model=MODEL, parallel={"dp": ranks}, cluster="h100")


def samples_of(groups: Groups) -> list[Branch]:
    sizes = [(trunk, trunk + own, tree) for tree, (trunk, owns) in enumerate(groups) for own in owns]
    return [Branch(tokens, tokens * (tokens + 1) // 2, trunk, tree) for trunk, tokens, tree in sizes]


def rows_of(samples: list[Branch]) -> list[np.ndarray]:
    """Tokens of the samples: those of a tree are alike in their trunk, and nowhere else."""
    heads = [np.stack([np.full(one.trunk, one.tree), np.zeros(one.trunk, dtype=np.int64)], 1) for one in samples]
    tails = [np.full((one.tokens - one.trunk, 2), number + 1) for number, one in enumerate(samples)]
    return [np.concatenate(both) for both in zip(heads, tails, strict=True)]


def step_s(chain: PlanChain, plan: StepPlan) -> float:
    return judge(plan, chain.context).step_s


def check_counts(samples: list[Branch], plan: StepPlan) -> None:
    """Each sample once; a micro-batch counts what a trie of its rows has, where no tree is in it in two parts. Of two,
    one may share a trunk that is not worth it to both together."""
    rows = rows_of(samples)
    placed = [s.sequence for m in plan.micro_batches for s in m.slices]
    assert sorted(placed) == list(range(len(samples)))
    for m in plan.micro_batches:
        own = [s.sequence for s in m.slices]
        assert all(s.stop == samples[s.sequence].tokens for s in m.slices)
        heads: dict[object, int] = defaultdict(int)
        for s in m.slices:
            heads[samples[s.sequence].tree] += s.start == 0
        computed = trie_of([rows[number] for number in own]).num_tokens
        assert computed * (WORTH - 1) <= m.num_padded_tokens * WORTH
        if set(heads.values()) == {1}:
            assert computed == m.num_padded_tokens


GROUPS = st.lists(
    st.tuples(st.integers(1, 600), st.lists(st.integers(1, 300), min_size=1, max_size=9)), min_size=1, max_size=6
)


@given(GROUPS, st.integers(1, 4), st.sampled_from([1000, 4096]), st.randoms(use_true_random=False))
def test_each_sample_once_and_no_slower_than_rows_alone(groups: Groups, ranks: int, cap: int, order: random.Random):
    made, samples = chain(ranks, cap), samples_of(groups)
    plan = plan_trees(made, samples)
    check_counts(samples, plan)
    assert plan_trees(made, samples).micro_batches == plan.micro_batches
    seconds = step_s(made, plan)
    alone = made.plan(trees._trees_of(samples).tokens)
    assert seconds <= step_s(made, alone) * (1 + ROUNDING)
    order.shuffle(samples)
    assert step_s(made, plan_trees(made, samples)) == pytest.approx(seconds, rel=1e-9)


def test_a_rank_alone_computes_each_trunk_once():
    samples = samples_of([(400, [20, 60, 100]), (200, [30]), (600, [50, 50])])
    samples.append(Branch(80, 80 * 81 // 2))
    plan = plan_trees(chain(1, 1 << 20), samples)
    assert plan.num_tokens == 400 + 180 + 230 + 700 + 80
    assert len(plan.micro_batches) == 1


def test_a_tree_over_the_cap_is_cut_into_as_many_parts_as_it_needs():
    samples = samples_of([(100, [20] * 8)])
    plan = plan_trees(chain(1, 180), samples)
    assert [m.num_padded_tokens for m in plan.micro_batches] == [180, 180]
    with pytest.raises(EvenloadError, match="a sequence is longer than"):
        plan_trees(chain(1, 110), samples)


def test_a_trunk_is_computed_again_where_that_evens_the_ranks():
    samples = samples_of([(80, [600] * 8)])
    plan = plan_trees(chain(4), samples)
    assert {m.ranks for m in plan.micro_batches} == {(0,), (1,), (2,), (3,)}
    assert plan.num_tokens == 4 * 80 + 8 * 600
    assert plan_trees(chain(4, 8192), samples_of([(80, [600] * 8)] * 4)).num_tokens == 4 * (80 + 8 * 600)


def test_a_trunk_that_is_not_worth_it_is_counted_with_every_sample():
    """As the trie has it: 17 tokens read each one that is saved."""
    samples = samples_of([(10, [86, 86])])
    assert plan_trees(chain(1), samples).num_tokens == 192
    assert plan_trees(chain(1), samples_of([(10, [80, 80])])).num_tokens == 170


def test_samples_that_are_their_trunk_alone_count_a_token_each():
    plan = plan_trees(chain(1), [Branch(64, 64 * 65 // 2, 64, "tree")] * 3)
    assert sorted((plan.lengths - plan.trunks).tolist()) == [1, 1, 64]


def test_longest_and_shortest_samples_share_a_part():
    """Parts of a tree take as long as each other."""
    samples = samples_of([(1000, [200, 400, 600, 800])])
    plan = plan_trees(chain(1, 2000), samples)
    assert [m.num_padded_tokens for m in plan.micro_batches] == [2000, 2000]


def test_what_bounds_plans_of_parts_bounds_no_plan_of_the_batch():
    """A plan of other parts may take less, so nothing is certified."""
    assert plan_trees(chain(2, 1000), samples_of([(80, [600] * 8)])).bound_s == 0.0


def test_where_trees_cannot_be_planned_whole_the_batch_is_planned_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = samples_of([(200, [10, 20, 30]), (1, [50])])
    batch = as_lengths([one.tokens for one in samples])
    assert plan_shared(chain(), batch, samples).trunks.any()

    def refuse(*_: object) -> None:
        raise EvenloadError("a rank holds too much", "whole trees", "cut them")

    monkeypatch.setattr(trees, "plan_trees", refuse)
    (plan,) = [plan for plan in PlanStages(chain(), batch, samples).run() if plan is not None]
    assert plan.digest == chain().plan(batch).digest
