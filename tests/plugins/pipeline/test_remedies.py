"""What is said to fit does: every setting that a refusal names plans the batch that was refused."""

import re
from dataclasses import fields, replace

import numpy as np
import pytest
from evenload.core.input.format import GIB
from evenload.core.laws import check
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.plugins.pipeline import remedies
from evenload.plugins.pipeline.checkpointing import DoesNotFitError
from evenload.plugins.pipeline.plan import plan

from ..chains import chain_of

LENGTHS = np.clip(np.random.default_rng(0).lognormal(6.5, 1.2, 24), 16, 20000).astype(int)


def chain(pp=2, vocab=1000, **words):
    return chain_of(
        {
            "model": {"num_layers": 16, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": vocab},
            "parallel": {"pp": pp, "dp": 1},
            "train": {"dtype": "bf16", "global_batch_size": 24},
            "cluster": "a100",
            "plugins": {"pipeline": {"enabled": True, "split_backward": "off", "max_extra": 0, **words}},
        }
    )


def asked(at, lengths=LENGTHS):
    """What the plugin plans."""
    return check(plan(StepPlan(as_lengths(lengths), (), at.limits), at.context, at.links[0][1]))


def refusal(at):
    with pytest.raises(DoesNotFitError) as caught:
        asked(at)
    return caught.value


SETTINGS = {
    "cut sequences": {"activation_gib": 0.3, "max_tokens": 2048},
    "logits": {"activation_gib": 0.8, "max_tokens": 2048, "vocab": 32000},
    "whole sequences": {"activation_gib": 0.15, "max_tokens": 4096},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_said_to_fit_does(name):
    setting = SETTINGS[name]
    do = refusal(chain(**setting)).do
    assert do.startswith("this batch would fit with any of: ")
    told = do.split(": ", 1)[1].split("; ")
    patterns = {
        r"plugins\.pipeline\.activation_gib raised to (\S+)": lambda n: asked(
            chain(**{**setting, "activation_gib": n})
        ),
        r"plugins\.pipeline\.max_tokens lowered to 1/(\d+) of it": lambda n: asked(
            chain(**{**setting, "max_tokens": setting["max_tokens"] // int(n)})
        ),
        r"plugins\.pipeline\.max_tokens raised to (\d+) times": lambda n: asked(
            chain(**{**setting, "max_tokens": setting["max_tokens"] * int(n)})
        ),
        r"parallel\.pp=(\d+) on \d+ times as many devices": lambda n: asked(chain(**setting, pp=int(n))),
        r"data\.max_length=(\d+)": lambda n: asked(chain(**setting), np.minimum(LENGTHS, int(n))),
    }
    for words in told:
        ((make, value),) = [(make, m[1]) for pattern, make in patterns.items() if (m := re.fullmatch(pattern, words))]
        assert make(value).micro_batches


def test_deeper_pipelines_are_those_of_their_recipes():
    at, deeper = chain(pp=2), chain(pp=8)
    limits, context = remedies._deeper(at.limits, at.context, 4)
    for name in (one.name for one in fields(limits)):
        assert getattr(limits, name) == pytest.approx(getattr(deeper.limits, name)), name
    for name, value in deeper.context.costs.memory.model_dump(exclude_none=True).items():
        assert getattr(context.costs.memory, name) == pytest.approx(value), name
    assert context.layout == deeper.context.layout


def test_a_batch_that_nothing_helps_is_refused_with_what_might():
    at = chain(activation_gib=1e-6)
    small = replace(at.context, cluster=at.context.cluster.model_copy(update={"memory_bytes": 1.0}))
    with pytest.raises(DoesNotFitError, match=r"lower plugins\.pipeline\.max_tokens or data\.max_length") as caught:
        asked(replace(at, context=small))
    assert "activation_gib" not in caught.value.do


def test_remedies_change_what_binds_where_another_plugin_has_caps_of_its_own():
    setting = SETTINGS["cut sequences"]
    at = chain(**{**setting, "max_tokens": 16384})
    cap = setting["activation_gib"] * GIB
    both = replace(at, limits=replace(at.limits, max_tokens=2048, max_activation_bytes=cap))
    do = refusal(both).do
    assert "activation_gib of every plugin raised to" in do
    assert "max_tokens raised" not in do
