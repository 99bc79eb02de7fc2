"""Plans over stages of unequal numbers of layers: lawful, in memory, above the bound, not behind other people's."""

import numpy as np
import pytest
from evenload.core.laws import check
from evenload.core.planning.judge import certified_s, judge, outcome_of

from ..chains import chain_of

LENGTHS = np.append(np.random.default_rng(5).integers(20, 500, 14), 2500)
CAPS = {"ample": 1.0, "little": 0.35}


def of_layers(layers, activation_gib=None, **train):
    section = {"enabled": True, "max_tokens": 512, "activation_gib": activation_gib}
    return chain_of(
        {
            "model": {"num_layers": 12, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1024},
            "data": {"max_length": 4096},
            "parallel": {"pp": 3, "dp": 2, "layers": layers},
            "train": {"global_batch_size": 15, **train},
            "plugins": {"pipeline": section},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "recompute"), [([6, 4, 2], False), ([1, 4, 7], True)])
def test_plans_keep_laws_memory_and_bounds(layers, recompute):
    ample = of_layers(layers, recompute=recompute)
    whole = ample.plan(LENGTHS)
    held = outcome_of(whole, ample.context).activation_bytes
    for share in CAPS.values():
        chain = of_layers(layers, share * float(held.max()) / 2**30, recompute=recompute)
        plan = check(chain.plan(LENGTHS))
        found = judge(plan, chain.context)
        assert found.fits
        assert found.step_s >= certified_s(plan, chain.context) > 0
        assert all(max(row) <= own for row, own in zip(plan.recompute, layers, strict=False))
        assert recompute or share == 1.0 or any(map(any, plan.recompute)), "layers run again for their memory"
    for name in ("whole_1f1b", "fixed_chunks", "algorithm_1"):
        other = judge(chain.baseline(name, LENGTHS), chain.context)
        assert not other.fits or found.step_s <= other.step_s * 1.003, name


def test_the_busiest_stage_is_the_one_with_most_layers():
    chain = of_layers([6, 4, 2])
    outcome = outcome_of(chain.plan(LENGTHS), chain.context)
    busy = outcome.busy_s.sum(axis=1)
    assert busy[0] > busy[1] > busy[2]
    assert busy[0] / busy[1] == pytest.approx(1.5, rel=1e-6), "neither has the output layer"
    fixed = (outcome.peak_bytes - outcome.activation_bytes).max(axis=1)
    assert fixed / fixed[1] == pytest.approx([1.5, 1.0, 0.5])
