"""What sequences take on a replica: against the simulated steps of its own planners."""

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import judge
from evenload.core.planning.replicas import ReplicaCost, dealt
from evenload.core.recipe.recipe import parse

LLAMA_7B = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 11008}
LENGTHS = np.random.default_rng(0).lognormal(6, 1.1, 64).astype(np.int64)


def chain_of(max_tokens=4096, memory_gib=74.5, **degrees):
    """The planners of a frozen 7B on A800s."""
    names = ["packing", *(["mesh"] if degrees.get("dp", 1) > 1 else []), *(["pipeline"] if "pp" in degrees else [])]
    plugins = {name: {"enabled": True, "max_tokens": max_tokens} for name in names}
    recipe = parse(
        {
            "model": {"vocab_size": 32000, **LLAMA_7B},
            "parallel": degrees,
            "train": {"dtype": "bf16", "global_batch_size": 64},
            "cluster": "a800",
            "memory_gib": memory_gib,
            "plugins": {**plugins, "lora": {"enabled": True}},
        }
    )
    return PlanChain.of_recipe(recipe, recipe.layout(int(np.prod(list(degrees.values())))))


@pytest.mark.parametrize(
    ("degrees", "within"), [({"tp": 1}, 0.005), ({"tp": 2}, 0.005), ({"dp": 4}, 0.03), ({"pp": 2}, 0.06)], ids=str
)
def test_a_packed_step_takes_what_its_sequences_do(degrees, within):
    chain = chain_of(**degrees)
    cost = ReplicaCost.of_chain(chain, 8192)
    step_s = judge(chain.plan(as_lengths(LENGTHS)), chain.context).step_s
    assert float(cost.seconds(LENGTHS).sum()) + cost.fixed_s == pytest.approx(step_s, rel=within)


def test_what_does_not_fit_is_dealt_to_where_it_does_and_refused_by_its_tokens():
    small, large = ReplicaCost.of_chain(chain_of(), 32768), ReplicaCost.of_chain(chain_of(tp=2), 32768)
    longest = small.lengths[-1]
    assert 4096 <= longest < large.lengths[-1] == 32768
    lengths = np.concatenate([LENGTHS, [longest + 1, 32768, 100]])
    found = dealt([small, large, small], lengths)
    assert np.bincount(found.replica_of).sum() == len(lengths)
    assert (found.replica_of[lengths > longest] == 1).all()
    assert set(found.replica_of.tolist()) == {0, 1, 2}
    with pytest.raises(EvenloadError, match=rf"(?s)fits on no replica.*32769 tokens.*{large.lengths[-1]}"):
        dealt([small, large], np.array([32769]))


def test_ranks_that_share_nothing_are_dealt_to_one_by_one():
    alone, pair = (ReplicaCost(1.0, 0.0, 0.0, lanes, (64,), (1.0,)) for lanes in (1, 2))
    found = dealt([alone, pair], np.full(30, 10))
    assert np.bincount(found.replica_of).tolist() == [10, 20]
    assert found.seconds.tolist() == [100.0, 100.0]
    assert dealt([alone, pair], np.array([60])).step_s == 60.0


def test_a_replica_without_room_says_what_it_lacks():
    with pytest.raises(EvenloadError, match=r"(?s)cannot run even short sequences.*lacks .* GiB"):
        ReplicaCost.of_chain(chain_of(memory_gib=14), 4096)
