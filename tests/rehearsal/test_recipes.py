"""Every recipe on a rehearsed GPU: nothing that CUDA refuses, and no more waiting than the tables below allow."""

import re
import shutil
from pathlib import Path

import pytest
from evenload.api import load_recipe

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 3
SMALL = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_query_groups=2",
    "data.max_length=512", "train.global_batch_size=8", f"train.steps={STEPS}", "train.dtype=bf16",
)  # fmt: skip
UNVALIDATED = (
    f"train.steps={STEPS}", "train.dtype=bf16", "train.global_batch_size=16", "train.export_prompts=0",
    "data.validation=null",
)  # fmt: skip
CASES = {
    "quickstart": SMALL,
    "slices": SMALL,
    "mesh": (*SMALL, "parallel.dp=2", "costs=cpu"),
    "pipeline": SMALL,
    "moe": SMALL,
    "gpu-node": (*SMALL, "parallel.dp=2"),
    "gpu-node, TP 2": (*SMALL, "parallel.dp=1", "parallel.tp=2"),
    "megatron-4-ranks": SMALL,
    "finetune": UNVALIDATED,
    "finetune, DeepSpeed": (*UNVALIDATED, "trainer=deepspeed", "deepspeed.zero_stage=3"),
    "mixture": (*SMALL, "data.validation=null"),
    "select": (*SMALL, "data.validation=null", "plugins.data.select.every=1"),
    "lora": (f"train.steps={STEPS}", "train.dtype=bf16"),
    "deepspeed": (*SMALL, "deepspeed.zero_stage=0"),
    "deepspeed, ZeRO 1": SMALL,
    "deepspeed, ZeRO 2": (*SMALL, "deepspeed.zero_stage=2"),
    "deepspeed, ZeRO 3": (*SMALL, "deepspeed.zero_stage=3"),
}


STEPS_OF = {"lora": 20}
"""Steps of a run whose end its tenants decide."""
LATER = """
import shutil
from evenload.plugins.lora import loop
_train = loop.TenantLoop._train
def train(self, planned):
    if self.step == 4 and self._job.is_rank0:
        shutil.copy("tenants/later/logging.yaml", "tenants")
    _train(self, planned)
loop.TenantLoop._train = train
"""
"""A tenant comes while the others train."""
TOTALS = "tolist at integrations/megatron/reduction.py:_sum_over_world"
NORM = "_local_scalar_dense at megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32"
WAITS = {
    "megatron": {
        TOTALS: (1, "the loss that is logged, and the divisor of the gradient: Megatron's loop reads the first, too"),
    },
    "lora": {
        "tolist at runtime/adapters/adapters.py:Adapters.norms": (1, "norms, by which tenants are clipped, and losses"),
        "Event.synchronize at integrations/host/scoring.py:scores_of": (2, "validations, of a tenant every other step"),
    },
    "mixture": {"Event.synchronize at integrations/host/scoring.py:scores_of": (1, "the losses of domains")},
    "select": {
        "Event.synchronize at integrations/host/scoring.py:scores_of": (
            2,
            "losses of domains, and of the samples drawn",
        ),
    },
    "deepspeed": {
        "tolist at integrations/deepspeed/engine/engine_host.py:EngineWeights.run": (1, "the loss, as any loop"),
        "_local_scalar_dense at integrations/deepspeed/engine/engine_host.py:EngineWeights.update": (1, "the norm"),
        "_local_scalar_dense at integrations/reference/textbook.py:norm_of": (1, "the norm, of ZeRO 0"),
    },
}
"""Waits of ours in a step and what each is for. All others are faults: a wait is a gap in what the device does."""
SETUP = (
    "weights.py", "engine.py:full_weights", "host.py:MegatronHost._build", "transfer.py", "tenant.py:TenantAdapter",
    "adapters.py:Adapters._whole",
)  # fmt: skip
"""Where weights and adapters come in before a step, or go out behind one."""


def allowed(case):
    return WAITS["deepspeed" if "deepspeed" in case.lower() else "megatron"] | WAITS.get(case, {})


LEFT_OUT = {"hf-trainer"}
"""Recipes for scripts that somebody else wrote, of which test_scripts.py runs some."""


def test_no_recipe_is_forgotten():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {case.partition(",")[0] for case in CASES} | LEFT_OUT


QUICK = ("slices", "moe")
"""Cases that `make test` runs."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.cuda) for case in CASES]
)
def test_a_recipe_runs_on_a_gpu(case, rehearse, tmp_path):
    recipe = RECIPES / f"{case.partition(',')[0]}.yaml"
    loaded, steps = load_recipe(recipe, CASES[case]), STEPS_OF.get(case, STEPS)
    words = ("train", str(recipe), *words_of(case, tmp_path))
    _, seen = rehearse(loaded.trainer, words, loaded.min_world_size, LATER if case == "lora" else "")
    for waits in seen.waits_of_ours(steps, *SETUP):
        most = {what: number for what, (number, _) in allowed(case).items()}
        assert not {what: n for what, n in waits.items() if n > most.get(what, 0)}, "more often than the table says"
    seen.check_copies(steps, *SETUP)
    if case == "lora":
        from evenload.plugins.lora.verb import standing

        ended = {row["name"]: (row["state"], row["step"]) for row in standing(tmp_path / "out")["tenants"]}
        assert ended.pop("multiprocessing")[0] in ("stopped", "done")
        assert ended == {"asyncio": ("done", 20), "email": ("done", 15), "logging": ("done", 10)}


def words_of(case, place):
    """What the case is asked for, in a folder where it may write: tenants leave word beside their files."""
    if case != "lora":
        return CASES[case]
    shutil.copytree(RECIPES / "tenants", place / "tenants")
    for path in place.glob("tenants/**/*.yaml"):  # a quarter of the steps
        path.write_text(re.sub(r"(steps|every): (\d+)", lambda m: f"{m[1]}: {int(m[2]) // 4}", path.read_text()))
    return (*CASES[case], f"plugins.lora.tenants={place / 'tenants'}", f"plugins.lora.out={place / 'out'}")
