"""`evenload bench` on a host that takes as long as was predicted, on a clock of its own."""

from dataclasses import dataclass, field, replace
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evenload.api import load_plugins
from evenload.commands.tables.bench import table as table_of_bench
from evenload.commands.tables.train import closing as closing_lines
from evenload.core.machine.layout import Layout
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.core.simulate.step import simulate
from evenload.integrations.host.host import UPDATE
from evenload.runtime.world.world import World
from evenload.training import measuring
from evenload.training.job import Job
from evenload.training.verbs import bench
from rich.console import Console

DISTURBED = 3.0


@dataclass
class Machine:
    """One step of six is disturbed."""

    chain: PlanChain
    now: float = 0.0
    layout: Layout = field(default_factory=Layout)
    dp_cp_rank: int = 0
    pipeline_stage: int = 0
    ran: list[str] = field(default_factory=list)
    weighed: list[str] = field(default_factory=list)

    def train_step(self, plan, tokens_of, *, lr, labels, mark, record=False, company=None):
        assert labels is None
        expected = simulate(plan, self.chain.context, record=record)
        (self.ran if record else self.weighed).append(plan.made_by)
        self.now += expected.step_s * (DISTURBED if len(self.ran) % 6 == 3 else 1.0)
        activations = [torch.empty(m.num_tokens, dtype=torch.uint8) for m in plan.micro_batches]
        mark(UPDATE)
        del activations
        torch.empty(2 * plan.num_tokens, dtype=torch.uint8)
        return SimpleNamespace(busy_s=float(expected.busy_s.sum()), forward_s=0.0, loss=1.0, spans=expected.spans)

    def describe(self):
        return {}


@pytest.fixture
def job(monkeypatch):
    load_plugins()
    recipe = parse(
        {
            "parallel": {"dp": 1},
            "train": {"steps": 2, "global_batch_size": 4},
            "planner": {"background": False},
            "plugins": {"packing": {"enabled": True, "max_tokens": 512}},
        }
    )
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    machine = Machine(chain)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    lengths = np.array([30, 500, 80, 200, 10, 300, 120, 90, 60, 40, 400, 250])
    source = SimpleNamespace(
        lengths=lengths, targets=None, groups=None, trunks=None, weight_sums=None, divisor=None, tokens=None
    )
    watchdog = SimpleNamespace(at=lambda *where, **more: None)
    return Job(recipe, World(0, 1, torch.device("cpu")), machine, chain, watchdog, source)


def test_predicted_steps_stand_beside_measured_ones(job):
    result = bench._bench(job, ("in_order",), 3)
    assert set(result["predicted_s"]) == set(result["measured_s"]) == {"in_order", "evenload"}
    for name, predicted in result["predicted_s"].items():
        assert len(predicted) == result["steps"] == 2
        # One run of three is disturbed: the median is not.
        assert result["measured_s"][name] == pytest.approx(predicted, rel=1e-9)
        assert result["prediction_error"][name] == pytest.approx(0.0, abs=1e-9)
        assert result["busiest_error"][name] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert result["predicted_s"]["in_order"] != result["predicted_s"]["evenload"]


def test_a_step_is_predicted_as_uneven_as_experts_were_before(job):
    one = bench.Measured()
    assert one.knowing(job.chain.context).costs.expert_imbalance == 1.0
    one.expert_imbalance += [1.5, 2.0]
    assert one.knowing(job.chain.context).costs.expert_imbalance == 1.75


def test_repeats_alternate_and_one_run_shows_what_disturbs_it(job):
    once = bench._bench(job, ("in_order",), 1)
    assert len(job.host.ran) == 2 * 3
    assert max(once["prediction_error"].values()) > 0.2
    job.host.ran.clear()
    bench._bench(job, ("in_order",), 2)
    ran = job.host.ran
    assert len(ran) == 2 * 2 * 3
    for first in (0, 4, 8):
        assert ran[first] == ran[first + 3] != ran[first + 1] == ran[first + 2]
    assert ran[0] == ran[8] != ran[4]


def test_each_variant_has_the_bubble_of_its_spans_and_the_peak_of_its_passes(job):
    """On this machine spans are the simulator's, and the passes of a step hold a byte a token; its update holds two."""
    result = bench._bench(job, ("in_order",), 1)
    assert result["bubble_frac"] == pytest.approx(result["predicted_bubble_frac"], abs=1e-12)
    draws = job.drawing()
    tokens = {sum(draws().lengths.tolist()) for _ in range(3)}
    peaks = result["peak_activation_bytes"]
    assert peaks["in_order"] == peaks["evenload"] in tokens
    assert result["peak_activation_bytes_of_stages"] == {name: [peak] for name, peak in peaks.items()}
    assert all(len(rows) == 1 for rows in result["predicted_peak_activation_bytes_of_stages"].values())
    assert len(job.host.weighed) == 2

    result["host"] = {"trainer": "a machine", "device": "cpu"}
    result["predicted_peak_activation_bytes_of_stages"] = {"in_order": [3 * 2**20, 2**20], "evenload": [2**31]}
    console = Console(width=160, record=True, file=StringIO())
    console.print(table_of_bench(result))
    text = " ".join(console.export_text().split())
    assert "measured (predicted: 3 MiB (in_order), 2 GiB (evenload))" in text
    assert "Shown: no difference, as 2 alternating steps are too few to tell (6 at least). Not shown: GPUs," in text


def test_a_planner_of_layers_without_experts_is_told_of_once(job, caplog):
    recipe = job.recipe.changed({"plugins.packing.enabled": False, "plugins.moe.enabled": True})
    bench._bench(replace(job, recipe=recipe, chain=PlanChain.of_recipe(recipe, recipe.layout())), ("stock",), 1)
    assert [r.message for r in caplog.records] == ["without effect: plugins.moe, as the model has no experts"]


def test_a_run_without_plugins_says_that_it_is_stock(job, caplog):
    """Every plan is then the baseline's own, which the closing line says in place of a ratio."""
    bare = replace(job, recipe=job.recipe.changed({"train.steps": 6}), chain=replace(job.chain, links=()))
    result = bench._bench(bare, ("stock",), 1)
    said = "no plugin is switched on: bench runs the trainer's own plan, stock, as evenload's too"
    assert [r.message for r in caplog.records] == [said]
    assert result["ratio"]["stock"]["same_plans"]
    (line, *_) = closing_lines(result["ratio"], {"device": "cpu"})
    assert "none over stock, whose plan evenload runs in every step" in str(line)
