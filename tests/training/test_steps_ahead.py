"""Runs of real trainers whose ranks take turns to plan, several steps ahead: they stop and go on as others do."""

import json
import random
import shutil

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow

RECIPE = """
trainer: {trainer}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4}}
data: {{source: tail.jsonl, max_length: 512}}
parallel: {{dp: 2}}
train: {{steps: 6, global_batch_size: 6, lr: 1.0e-2, seed: 4}}
checkpoint: {{every: 2}}
planner: {{budget_ms: 60000}}
plugins: {{packing: {{enabled: true, max_tokens: 512, max_delay_steps: 2}}, mesh: {{enabled: true, max_tokens: 512}}}}
"""
TAKE_TURNS = "from evenload.core.planning import planner; planner.WORTH_S = 0.0"
COUNTED = f"""{TAKE_TURNS}
import os
from evenload.core.planning.turns import Sender
end = Sender.end
def counted(self, *arguments, **more):
    with open(f"planned.{{os.environ['RANK']}}", "a") as file:
        file.write(f"{{self.number}} ")
    return end(self, *arguments, **more)
Sender.end = counted
"""


@pytest.mark.parametrize("trainer", ["megatron", only_full("deepspeed")])
def test_a_run_that_stops_and_goes_on_trains_what_one_step_ahead_trains(trainer, tmp_path, ran):
    letters = random.Random(1)
    lengths = [400 + k if k % 5 == 0 else 20 + k % 7 for k in range(40)]
    rows = [{"text": "".join(letters.choices("abcdefghij klmnop", k=n))} for n in lengths]
    (tmp_path / "tail.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(trainer=trainer))

    def steps(*arguments, planted=""):
        rows = ran(tmp_path, "train", "recipe.yaml", *arguments, planted=planted)["steps"]
        return [(row["loss"].hex(), row["tokens"], row["waiting"]) for row in rows]

    whole = steps("planner.steps_ahead=1")
    assert any(waiting for _, _, waiting in whole)
    saved = "checkpoint.dir=whole", "checkpoint.keep=9"
    assert steps("planner.steps_ahead=3", *saved, planted=COUNTED) == whole
    numbers = [{*map(int, (tmp_path / f"planned.{rank}").read_text().split())} for rank in range(2)]
    # The one behind the last step may be done before the run ends, or not.
    assert [own - {6} for own in numbers] == [{0, 2, 4}, {1, 3, 5}], "each step is planned once, by the ranks in turn"
    shutil.copytree(tmp_path / "whole" / "step00000004", tmp_path / "kept" / "step00000004")
    assert steps("planner.steps_ahead=3", "checkpoint.dir=kept", planted=TAKE_TURNS) == whole[4:]
