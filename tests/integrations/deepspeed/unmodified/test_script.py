"""A DeepSpeed script that nobody edited, stock and with evenload: 2 forked ranks, with every ZeRO stage.

tests/commands/test_check.py starts it by torchrun.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[3] / "scripts" / "deepspeed_script.py"
WITH_EVENLOAD = SCRIPT.with_name("run_with_evenload.py")
RANKS, SAMPLES_PER_MICRO_BATCH, GAS, CAP = 2, 2, 2, 160
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": SAMPLES_PER_MICRO_BATCH,
    "gradient_accumulation_steps": GAS,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}
NUMBERS = [f"evenload_{name}" for name in ("plan_s", "predicted_s", "predicted_imbalance", "padding_frac")]
SECTION = {"evenload": {"packing": {"enabled": True, "max_tokens": CAP, "slices": "even"}}}


def _start(scripted, folder, ds_config, *words):
    (folder / "ds.json").write_text(json.dumps(ds_config))
    words = ("--ds-config", folder / "ds.json", "--out", folder, *words)
    return scripted("deepspeed", folder, WITH_EVENLOAD, SCRIPT, *words, ranks=RANKS)


def _results(folder, stage):
    return [torch.load(folder / f"stage{stage}.rank{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def plain():
    """The weights after the script's epoch of exact steps on the token mean of each global batch, and before it."""
    script = runpy.run_path(str(SCRIPT), run_name="plain")
    data, model = script["Samples"](), script["build_model"]()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    orders = [list(DistributedSampler(data, num_replicas=RANKS, rank=rank)) for rank in range(RANKS)]
    size = SAMPLES_PER_MICRO_BATCH * GAS
    steps = len(orders[0]) // size
    for step in range(steps):
        model.zero_grad()
        batch = [data[i] for order in orders for i in order[step * size : (step + 1) * size]]
        rows = [script["collate"]([sample]) for sample in batch]
        targets = [int((row["labels"][0, 1:] != -100).sum()) for row in rows]
        for row, count in zip(rows, targets, strict=True):
            if count:
                (model(**row).loss * count / sum(targets)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad
    evaluation = model.eval()(**script["collate"]([data[0], data[1]])).loss.item()
    return {"steps": steps, "start": start, "weights": dict(model.named_parameters()), "evaluation": evaluation}


def _errors(weights, plain):
    """(largest absolute error, largest error of a matrix relative to how far training moved it)"""
    wanted, start = plain["weights"], plain["start"]
    with torch.no_grad():
        absolute = max(float((weights[name] - p).abs().max()) for name, p in wanted.items())
        relative = max(
            float((weights[name] - p).norm() / (p - start[name]).norm()) for name, p in wanted.items() if p.ndim == 2
        )
    return absolute, relative


def _assert_restored(done):
    """On rank 0, and on the other one too, or it would have failed."""
    assert done.returncode == 0, done.stderr[-3000:]
    assert "RESTORED" in done.stdout


def test_every_stage_takes_exact_steps_and_disable_restores_every_symbol(tmp_path, plain, scripted):
    done = _start(scripted, tmp_path, DS_CONFIG | SECTION, "--stages", "0", "1", "2", "3")
    _assert_restored(done)
    for stage in (0, 1, 2, 3):
        for result in _results(tmp_path, stage):
            absolute, relative = _errors(result["weights"], plain)
            assert absolute < 3e-7
            assert relative < 1e-5
            assert result["steps"] == plain["steps"]
            assert len(result["shapes"]) == plain["steps"] * GAS
            assert all(rows == 1 and tokens <= CAP for rows, tokens in result["shapes"])
            assert result["evaluation"] == pytest.approx(plain["evaluation"], abs=1e-6)


def test_activation_checkpointing_changes_nothing_and_a_monitor_gets_the_numbers(tmp_path, plain, scripted):
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "monitor"), "job_name": "script"}}
    done = _start(scripted, tmp_path, DS_CONFIG | SECTION | monitor, "--stages", "3", "--checkpointing")
    _assert_restored(done)
    rows = {path.stem: path.read_text().split()[1:] for path in (tmp_path / "monitor" / "script").glob("*.csv")}
    samples = {name: [row.split(",")[0] for row in rows[f"Train_Samples_{name}"]] for name in ("lr", *NUMBERS)}
    assert samples["lr"] == [str(RANKS * SAMPLES_PER_MICRO_BATCH * GAS * (s + 1)) for s in range(plain["steps"])]
    assert all(samples[name] == samples["lr"] for name in NUMBERS)
    assert all(float(row.split(",")[1]) >= 1 for row in rows["Train_Samples_evenload_predicted_imbalance"])
    # Slices are asked for; a script runs whole samples, and each rank says so once.
    assert done.stderr.count("packing.slices=even has no effect") == RANKS
    absolute, relative = _errors(_results(tmp_path, 3)[0]["weights"], plain)
    assert absolute < 3e-7
    assert relative < 1e-5


def test_without_the_section_the_rows_change_nothing_and_steps_are_not_exact(tmp_path, plain, scripted):
    _assert_restored(_start(scripted, tmp_path, DS_CONFIG, "--stages", "1"))
    stock, _ = _results(tmp_path, 1)
    assert any(rows > 1 for rows, _ in stock["shapes"])
    assert _errors(stock["weights"], plain)[1] > 1e-2


def test_a_batch_that_cannot_fit_stays_as_it_is_and_names_what_to_raise(tmp_path, scripted):
    section = {"evenload": {"packing": {"enabled": True, "max_tokens": 84}}}
    done = _start(scripted, tmp_path, DS_CONFIG | {"gradient_accumulation_steps": 1} | section, "--stages", "1")
    stock = _results(tmp_path, 1)
    assert stock, "it trains as without evenload"
    assert any(rows > 1 for rows, _ in stock[0]["shapes"])
    assert "nothing is planned in DeepSpeed" in done.stderr
    assert "gradient_accumulation_steps" in done.stderr
    assert "max_tokens" in done.stderr
