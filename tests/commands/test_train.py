"""Training by the command line on real trainers: results, resume, kills, full disks."""

import fcntl
import functools
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from evenload.core.recipe.pretrained import folder_of
from evenload.training.checkpoint.checkpoints import newest_whole
from evenload.training.checkpoint.manifest import read as load_manifest
from harness.cases import full, only_full
from harness.commands import OF_A_JOB, TORCHRUN, Done

pytestmark = pytest.mark.slow

RECIPE = """
trainer: {trainer}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}}
data: {{max_length: 256, long_samples: truncate}}
parallel: {{dp: 2}}
train: {{steps: 4, global_batch_size: 6, lr: 1.0e-2}}
checkpoint: {{every: 2, keep: 2}}
plugins: {{packing: {{enabled: true, max_tokens: 512}}}}
"""
TRAINERS = ("megatron", "deepspeed")
KEPT = ("checkpoint.dir=kept", "log.jsonl=log.jsonl")


def losses(done):
    """Losses bit for bit."""
    return [row["loss"].hex() for row in result_of(done)["steps"]]


def result_of(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def ended(done, code, *texts):
    """With messages that hold these texts, and without a traceback."""
    assert done.returncode == code, done.stderr[-3000:]
    assert [text for text in texts if text not in done.stderr] == [], done.stderr[-3000:]
    assert "Traceback" not in done.stderr


def samples(log):
    return [json.loads(line)["samples"] for line in log.read_text().splitlines()]


def chosen(root):
    """The checkpoint from which a run would go on."""
    newest = newest_whole(root)
    return newest[0].name if newest else None


@pytest.fixture
def place(tmp_path):
    return written(tmp_path)


def written(folder):
    """A folder with a recipe for each trainer."""
    for trainer in TRAINERS:
        (folder / f"{trainer}.yaml").write_text(RECIPE.format(trainer=trainer))
    return folder


@dataclass(frozen=True)
class Whole:
    """A run of four steps that nothing disturbed, recorded in the second and third one."""

    folder: Path
    done: Done

    @property
    def samples(self):
        return samples(self.folder / "log.jsonl")

    def begun(self, place, step=2):
        """Its checkpoints up to a step and its log, in another folder."""
        shutil.copytree(self.folder / "kept", place / "kept")
        shutil.copy(self.folder / "log.jsonl", place)
        for later in range(step + 2, 5, 2):
            shutil.rmtree(place / "kept" / f"step0000000{later}")
        (place / "kept" / "latest").write_text(f"step0000000{step}")
        return place / "kept"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, forged):
    """``whole("megatron")``: a run that each trainer does once."""

    @functools.cache
    def run(trainer):
        folder = written(tmp_path_factory.mktemp(trainer))
        words = (*KEPT, "log.trace_steps=2", "--trace", "t.json", "--json")
        return Whole(folder, forged(folder, "train", f"{trainer}.yaml", *words))

    return run


@pytest.mark.parametrize("trainer", ["megatron", only_full("deepspeed")])
def test_resume_is_bit_equal_and_passes_over_a_checkpoint_with_one_flipped_bit(trainer, place, forged, whole):
    """No sample is lost or repeated, and neither recording nor a baseline in turn changes a loss."""
    undisturbed = whole(trainer)
    assert len(losses(undisturbed.done)) == 4
    refuse_wrong_trace(json.loads((undisturbed.folder / "t.json").read_text()), json.loads(undisturbed.done.stdout))
    kept = undisturbed.begun(place, 4)
    newest = kept / "step00000004"
    sizes = load_manifest(newest).files
    for file in sorted(p for p in (newest / "trainer").rglob("*") if p.is_file() and p.stat().st_size)[1::2]:
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        file.write_bytes(flipped)
        assert sizes[str(file.relative_to(newest))].size == len(content)
        assert chosen(kept) == "step00000002", file
        file.write_bytes(content)
    assert chosen(kept) == "step00000004"
    file.write_bytes(flipped)
    resumed = forged(place, "train", f"{trainer}.yaml", "--against", "stock", *KEPT, "--json")
    assert losses(resumed) == losses(undisturbed.done)[2:]
    assert f"{file.name} has other content than was written" in resumed.stderr
    assert "going on from the older checkpoint step00000002" in resumed.stderr
    stock = json.loads(resumed.stdout)["comparison"]["stock"]
    assert stock["loss_rel_diff"] < 1e-4, "the baseline goes on from the same checkpoint"
    assert (stock["steps"], stock["interval"], stock["same_plans"]) == (1, None, False)
    assert samples(place / "log.jsonl") == undisturbed.samples, "steps that were trained again stand there once"
    assert chosen(kept) == "step00000004"


@pytest.mark.parametrize("trainer", ["deepspeed", only_full("megatron")])
def test_loads_are_written_of_every_token_in_every_layer(trainer, place, forged):
    moe = ("model.family=mixtral", "model.moe={num_experts: 4, topk: 2}", "parallel.ep=2", "train.recompute=true")
    logs = ("log.jsonl=steps.jsonl", "log.loads=loads.jsonl")
    done = forged(place, "train", f"{trainer}.yaml", "plugins.packing.max_tokens=256", *moe, *logs, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    head, *lines = [json.loads(line) for line in (place / "loads.jsonl").read_text().splitlines()]
    assert head == {"format": 1, "experts": 4, "topk": 2, "layers": [0, 1], "ranks": 2, "ep": 2}
    steps = [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [step["step"] for step in steps]
    for line, step in zip(lines, steps, strict=True):
        counts = np.array(line["counts"])
        assert counts.shape[1:] == (2, 2, 4)
        assert counts.sum(axis=(0, 2, 3)).tolist() == [2 * step["tokens"]] * 2
        of_ranks = counts.sum(axis=2).reshape(-1, 2, 2).sum(axis=2)  # [rounds * layers, ranks]
        ratios = of_ranks.max(axis=1) / of_ranks.mean(axis=1)
        assert step["moe"]["imbalance_max"] == pytest.approx(ratios.max())


SLOW = """
import os, resource, signal, time
import evenload.integrations.megatron.saving.storage as storage
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
write = storage.InProcessWriter._write
def slowly(self, *arguments):
    time.sleep(1)  # longer than the steps that train meanwhile
    if os.environ["RANK"] == "0" and os.path.exists("full"):  # which writes what replicas have in common
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    write(self, *arguments)
storage.InProcessWriter._write = slowly
"""


def test_a_checkpoint_in_the_background_is_of_its_step_and_fails_with_one_message(place, forged):
    def run(*words):
        # A distributed optimizer gathers its states, weights among them, into tensors of their own.
        whole = ("megatron.distributed_optimizer=false", *words)
        kept = ("checkpoint.dir=kept", "checkpoint.background=true", *whole, "--json")
        return forged(place, "train", "megatron.yaml", *kept, planted=SLOW)

    whole = losses(run())
    assert sorted(p.name for p in (place / "kept").glob("step*")) == ["step00000002", "step00000004"]
    shutil.rmtree(place / "kept" / "step00000004")
    (place / "kept" / "latest").write_text("step00000002")
    assert losses(run()) == whole[2:], "later steps did not change what was being written"
    (place / "full").touch()
    done = run("train.steps=8")
    ended(done, 1, "found: rank 0: ")
    assert done.stderr.count("the checkpoint step00000006 was not written") == 1, done.stderr
    assert (place / "kept" / "latest").read_text() == "step00000004"


def refuse_wrong_trace(trace, result):
    """Steps 1 and 2 of both ranks, measured and predicted side by side; and what is said of idleness."""
    assert trace["otherData"]["steps"] == [1, 2]
    assert trace["otherData"]["bubbles"] == result["bubbles"]
    pids = {e["args"]["name"]: e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert list(pids) == ["evenload, measured", "evenload, predicted"]
    steps = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "step"]
    measured, predicted = ([e["ts"] for e in steps if e["pid"] == pid] for pid in pids.values())
    assert measured == predicted
    assert measured[1] > max(e["ts"] + e["dur"] for e in steps if e["name"] == "step 0")
    assert len(result["idle"][0]) == 2
    assert all(row["predicted_s"] > 0 and 0 <= row["bubble_frac"] <= row["bubble_worst"] < 1 for row in result["steps"])


CHAIN = ("parallel.dp=4",), ("parallel.dp=1", "parallel.tp=2")


@pytest.mark.parametrize(
    ("trainer", "begun", "layouts"),
    [("megatron", 2, CHAIN), only_full("deepspeed", 2, (("parallel.dp=4",), ("parallel.dp=1",)))]
    + [only_full(trainer, 0, [(f"parallel.dp={ranks}",) for ranks in (4, 2, 1, 4)]) for trainer in TRAINERS],
)
def test_every_sample_is_seen_once_over_changing_numbers_of_ranks(trainer, begun, layouts, place, forged, whole):
    """A step on each layout after `begun` ones of an undisturbed run: a plan never changes the mathematics."""
    undisturbed = whole(trainer)
    if begun:
        undisturbed.begun(place, begun)
    wanted = result_of(undisturbed.done)["steps"]
    rows = wanted[:begun]
    for number, layout in enumerate(layouts, begun + 1):
        words = (*layout, f"train.steps={number}", "checkpoint.every=1", *KEPT, "--json")
        rows += result_of(forged(place, "train", f"{trainer}.yaml", *words))["steps"]
    assert [row["step"] for row in rows] == list(range(4))
    assert samples(place / "log.jsonl") == undisturbed.samples
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in wanted], rel=1e-5)


def heavy_tail(place):
    """Short samples with a long one now and then, and arguments that let the long ones wait."""
    lengths = [400 + k if k % 5 == 0 else 20 + k % 7 for k in range(40)]
    # Text that varies: equal tokens have equal keys, whose gradients are nothing but rounding.
    letters = random.Random(1)
    rows = [{"text": "".join(letters.choices("abcdefghij klmnop", k=n))} for n in lengths]
    (place / "tail.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    delay = "plugins.packing.max_delay_steps=3"
    # The seed puts one long sample into the first batch.
    return "data.source=tail.jsonl", "data.max_length=512", "train.steps=5", "train.seed=4", delay


def test_outliers_wait_for_each_other_also_across_a_resume(place, forged):
    late = heavy_tail(place)
    whole = forged(place, "train", "megatron.yaml", *late, "log.jsonl=whole.jsonl", "--json")
    result, log = json.loads(whole.stdout), (place / "whole.jsonl").read_text().splitlines()
    assert result["delay_steps"] > 0
    assert max(row["delay_steps"] for row in result["steps"]) > result["delay_steps"]
    assert [row["waiting"] for row in result["steps"]] == [json.loads(line)["waiting"] for line in log]
    assert len({len(batch) for batch in samples(place / "whole.jsonl")}) > 1
    cut = next(k for k, row in enumerate(result["steps"][:4]) if row["waiting"])
    save = (*late, f"checkpoint.every={cut + 1}", "log.jsonl=parts.jsonl", "--json")
    first = forged(place, "train", "megatron.yaml", *save, "checkpoint.dir=kept", f"train.steps={cut + 1}")
    waiting = result["steps"][cut]["waiting"]
    assert f"{waiting} samples still wait for a later batch; they are in the checkpoint" in first.stderr
    alone = forged(place, "train", "megatron.yaml", *save, "checkpoint.dir=kept", "parallel.dp=1")
    assert "as for the 2 ranks that the run began with" in alone.stderr
    of_both = [row["loss"] for done in (first, alone) for row in result_of(done)["steps"]]
    assert of_both == pytest.approx([row["loss"] for row in result["steps"]], rel=1e-5)
    assert samples(place / "parts.jsonl") == samples(place / "whole.jsonl")


def test_batches_of_any_size_are_verified(place, forged):
    """Delay makes the first batch smaller than train.global_batch_size; gradients are still the reference's."""
    result = result_of(forged(place, "verify", "megatron.yaml", *heavy_tail(place), "--steps", "1", "--json"))
    assert result["exact"]
    assert result["sequences"] < 6


WANDB = """
import json
class Run:
    def log(self, scalars, step): note([step, scalars])
    def __enter__(self): return self
    def __exit__(self, kind, error, trace): note(error)
def init(project, config):
    note(project)
    return Run()
def note(what):
    with open("wandb.jsonl", "a") as file:
        print(json.dumps(what), file=file)
"""


def refuse_wrong_page(page, result):
    """The page has the measured steps after the first, and says that they are measured."""
    table = page[page.index('<table id="planners">') :]
    for name in ("evenload", "stock", "in order"):
        row = table[table.index(f">{name}</th>") :]
        value = float(re.search(r'<data value="([^"]+)"', row).group(1))
        variant = result["variants"][name.replace(" ", "_")]
        assert value == pytest.approx(variant["step_s"] * (1 - variant["plan_share"]), rel=1e-6)
    assert "(measured, mean of 4 steps)" in page
    assert "Times are measured where this page was made." in page


def refuse_wrong_boards(place, rows):
    """TensorBoard and Weights & Biases have the numbers of every step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / "board"))
    events.Reload()
    wanted = ("imbalance", "tokens_per_s", "padding_frac", "step_s", "predicted_s", "bubble_frac")
    assert {f"evenload/{name}" for name in wanted} <= set(events.Tags()["scalars"])
    for name in ("loss", "delay_steps", "waiting"):
        assert [e.value for e in events.Scalars(f"evenload/{name}")] == pytest.approx([row[name] for row in rows])
    project, *logged, end = [json.loads(line) for line in (place / "wandb.jsonl").read_text().splitlines()]
    assert (project, end) == ("evenly", None)
    assert [set(scalars) for _, scalars in logged] == [set(events.Tags()["scalars"])] * len(rows)
    assert [(step, scalars["evenload/mfu"]) for step, scalars in logged] == [(r["step"], r["mfu"]) for r in rows]


@pytest.mark.parametrize(
    ("trainer", "dtype", "tolerance"), [("megatron", "fp64", 1e-6), only_full("deepspeed", "fp32", 1e-4)]
)
def test_against_trains_each_variant_on_equal_batches(trainer, dtype, tolerance, place, forged):
    """Of any size, since long samples wait; and all that is asked for is written."""
    (place / "installed").mkdir()
    (place / "installed" / "wandb.py").write_text(WANDB)
    words = (*heavy_tail(place), f"train.dtype={dtype}", "planner.refit=true", "--against", "stock,in_order", "--json")
    pictures = ("--trace", "t.json.gz", "--plot", "p.png", "--report", "r.html")
    logs = ("log.tensorboard=board", "log.wandb=evenly", *pictures)
    path = "import sys; sys.path.insert(0, 'installed')"
    done = forged(place, "train", f"{trainer}.yaml", *words, *logs, planted=path)
    result = result_of(done)
    rows = result["steps"]
    variants = result["variants"]
    assert set(variants) == {"stock", "in_order", "evenload"}
    assert result["comparison"]["in_order"]["loss_rel_diff"] < tolerance
    for variant in variants.values():
        assert variant["loss"] == pytest.approx(variants["evenload"]["loss"], rel=tolerance)
        assert variant["delay_steps"] == variants["evenload"]["delay_steps"] > 0
        assert variant["refit"]["prior"] != variant["refit"]["newest"]
    assert variants["evenload"]["padding_frac"] == 0
    summary = result["summary"]
    assert (summary["steps"], summary["targets"]) == (len(rows), sum(row["targets"] for row in rows))
    assert 0 < summary["targets"] < summary["tokens"]
    assert result["pictures"] == {"plot": "p.png", "report": "r.html"}
    refuse_wrong_page((place / "r.html").read_text(), result)
    refuse_wrong_boards(place, rows)
    assert (place / "p.png").read_bytes().startswith(b"\x89PNG")
    with gzip.open(place / "t.json.gz") as file:
        events = json.load(file)["traceEvents"]
    shown = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    kinds = ("measured", "predicted")
    assert shown == [f"{name}, {kind}" for name in ("evenload", "stock", "in_order") for kind in kinds]


@pytest.mark.parametrize(
    ("trainer", "limited_rank"), [only_full("megatron", "0"), only_full("deepspeed", "0"), ("deepspeed", "1")]
)
def test_a_rank_that_cannot_write_ends_all_at_once_and_keeps_the_old_checkpoint(
    trainer, limited_rank, place, forged, whole
):
    """The second save fails half-way on one rank, by a limit on file sizes, while the other one waits for it."""
    kept = whole(trainer).begun(place)
    before = sorted(p.name for p in (kept / "step00000002").rglob("*"))
    limited = "import os, resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += f"os.environ['RANK'] == '{limited_rank}' and "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    done = forged(place, "train", f"{trainer}.yaml", "checkpoint.dir=kept", "safety.stuck_s=60", planted=limited)
    ended(done, 1, "the checkpoint step00000004 was not written", f"found: rank {limited_rank}: ")
    assert "the last good checkpoint is step00000002" in done.stderr
    assert "is stuck" not in done.stderr
    assert sorted(p.name for p in (kept / "step00000002").rglob("*")) == before
    assert chosen(kept) == "step00000002"


PLANTED = """
from dataclasses import replace
import os
import evenload.training.learning as learning
import evenload.training.run.variant as variant
from evenload.core.costs.refit import coefficients, rows_of
run_step, with_values = variant.run_step, learning._with
def planted(job, planned, step, ending, record):
    truth = coefficients(job.chain.context.costs)[:6] * [1, 1, 30, 1, 1, 30]
    forward_s, backward_s = (rows_of(planned.plan, False) @ truth).T[:, None]
    step = run_step(job, planned, step, ending, record=record)
    return replace(step, busy_s=forward_s + backward_s, forward_s=forward_s)
variant.run_step = planted
def own(chain, values):
    rank = int(os.environ["RANK"])
    return with_values(chain, values * [1, 1, 100**rank, 1, 1, 100**rank, 1])
if os.path.exists("mutant"):
    learning._with = own
"""


def test_costs_follow_the_steps_and_ranks_and_resumes_plan_alike(place, forged):
    """Busy seconds are planted, so that two runs measure the same: attention takes 30 times what the costs say."""

    def run(*arguments):
        return forged(place, "train", "megatron.yaml", "planner.refit=true", *arguments, "--json", planted=PLANTED)

    uneven = heavy_tail(place)[:2]  # samples of one length show nothing but sums
    save = (*uneven, "train.steps=6", "checkpoint.every=4", "checkpoint.dir=kept")
    done = run(*save)
    whole = losses(done)
    found = json.loads(done.stdout)["refit"]
    assert found["newest"][5] / found["newest"][4] > 5 * found["prior"][5] / found["prior"][4]
    shutil.rmtree(place / "kept" / "step00000006")
    (place / "kept" / "latest").write_text("step00000004")
    assert losses(run(*save)) == whole[4:]
    (place / "mutant").touch()
    mutant = run(*uneven, "train.steps=6")
    assert mutant.returncode != 0
    assert "ranks planned different steps" in mutant.stderr


FAULT = """
import os
if os.environ.get("RANK") == "1":
    import evenload.runtime.attention.pack as pack
    real, calls = pack.build_pack, [0]
    def build_pack(*a, **k):
        calls[0] += 1
        if calls[0] == 5:
            FAULT
        return real(*a, **k)
    pack.build_pack = build_pack
"""


RAISES = "raise ValueError('bad sample 1234')", ("ValueError: bad sample 1234",)
HANGS = "import time; time.sleep(1000)", ("is stuck in '", "no rank made progress for 6 s", "time.sleep(1000)")


@pytest.mark.parametrize(
    ("trainer", "fault", "words"),
    [("megatron", *HANGS), ("deepspeed", *RAISES), only_full("megatron", *RAISES), only_full("deepspeed", *HANGS)],
)
def test_a_rank_that_raises_or_hangs_is_named(trainer, fault, words, place, forged):
    done = forged(place, "train", f"{trainer}.yaml", "safety.stuck_s=6", planted=FAULT.replace("FAULT", fault))
    assert done.returncode == 1, done.stderr[-3000:]
    assert done.stderr.count("evenload: rank 1 of 2") == 1, done.stderr[-3000:]
    assert "evenload: rank 0" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_checkpoint_of_other_data_and_one_that_another_run_writes_are_refused(place, forged, whole):
    lock = whole("megatron").begun(place) / ".lock"
    assert "on " in lock.read_text()
    words = ("train", "megatron.yaml", "checkpoint.dir=kept", "parallel.dp=1")
    with lock.open("w") as file:
        file.write("process 77 on elsewhere")
        file.flush()
        fcntl.lockf(file, fcntl.LOCK_EX)
        hasty = "import evenload.runtime.world.folder_lock as module; module.WAIT_S = 0.1"
        done = forged(place, *words, planted=hasty)
    ended(done, 2, "another run writes into kept", "process 77 on elsewhere")
    ended(forged(place, *words, "data.max_length=200"), 2, "the checkpoint was made with other data")


@full
@pytest.mark.parametrize("trainer", TRAINERS)
def test_torchrun_and_the_command_itself_start_the_job_that_the_forge_does(trainer, place, forged):
    words = ("train", f"{trainer}.yaml", "train.steps=2", "--json")
    clean = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    environment = {**clean, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def started(*command):
        how = {"cwd": place, "capture_output": True, "text": True, "timeout": 280, "env": environment}
        return subprocess.run([*command, "-m", "evenload", *words], check=False, **how)

    assert losses(started(sys.executable)) == losses(started(*TORCHRUN)) == losses(forged(place, *words))


EXCHANGED = """
import os
import evenload.data.content as content
from evenload.training.run import variant
content.LOOK_S = 0.0
step = variant.Variant.step
def exchanging(self, planned, number, *more, **how):
    if number == 2 and os.environ["RANK"] == "0":
        os.replace("other.jsonl", "data.jsonl")
    return step(self, planned, number, *more, **how)
variant.Variant.step = exchanging
"""


def test_data_that_are_exchanged_under_a_run_end_it_with_one_message(place, forged):
    """Rows of the same lengths: nothing else would notice."""
    for name, letter in (("data", "a"), ("other", "s")):
        rows = [json.dumps({"text": letter * (20 + i)}) for i in range(40)]
        (place / f"{name}.jsonl").write_text("\n".join(rows))
    words = ("data.source=data.jsonl", "checkpoint.dir=kept", "train.steps=9")
    done = forged(place, "train", "megatron.yaml", *words, planted=EXCHANGED)
    ended(done, 1, "data.jsonl changed while it was in use")
    assert chosen(place / "kept") == "step00000002"


@pytest.fixture
def small_disk(tmp_path):
    """``small_disk(kib)``: a file system of its own with so much space; skips where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kib):
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no file system can be mounted here")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


@pytest.mark.parametrize("trainer", ["megatron", only_full("deepspeed")])
def test_a_full_disk_is_named(trainer, place, forged, small_disk):
    disk = small_disk(1500)
    save = (f"checkpoint.dir={disk}", "checkpoint.every=1", "checkpoint.keep=9", "train.steps=9", "safety.stuck_s=60")
    done = forged(place, "train", f"{trainer}.yaml", *save)
    ended(done, 1, "was not written: the disk is full", f"free space on the disk of {disk}")
    assert chosen(disk) is not None


def test_a_log_that_fails_is_given_up_and_training_goes_on(place, forged, small_disk):
    disk = small_disk(16)
    (disk / "others").write_bytes(bytes(9 << 10))
    logs = (f"log.jsonl={disk}/log.jsonl", f"log.tensorboard={disk}/board", "--trace", f"{disk}/t.json")
    small = ("parallel.dp=1", "train.global_batch_size=1", "train.steps=40")
    done = forged(place, "train", "megatron.yaml", *logs, *small, "--json")
    assert len(losses(done)) == 40
    ended(done, 0, "log.jsonl is given up after step", "no trace: the file cannot be written")


ELSEWHERE = """
import os
if os.environ.get("RANK") == "1":
    os.chdir("elsewhere")
"""


def test_ranks_that_would_read_other_samples_of_the_same_lengths_train_nothing(place, forged):
    (place / "elsewhere").mkdir()
    shutil.copy(place / "megatron.yaml", place / "elsewhere")
    for folder, letters in ((place, "ab"), (place / "elsewhere", "cd")):
        rows = [json.dumps({"text": letters * (20 + number)}) for number in range(60)]
        (folder / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    words = ("train", "megatron.yaml", "data.source=corpus.jsonl", "log.jsonl=log.jsonl")
    ended(forged(place, *words, planted=ELSEWHERE), 1, "the ranks hold different samples of corpus.jsonl")
    assert not (place / "log.jsonl").exists()


OTHER_WEIGHTS = """
import os
from pathlib import Path
from evenload.integrations.huggingface.folders.reading import WeightFolder
if os.environ.get("RANK") == "1":
    opened = WeightFolder.open.__func__
    WeightFolder.open = classmethod(lambda cls, path: opened(cls, path.with_name("elsewhere")))
"""


def test_ranks_that_would_start_from_other_weights_train_nothing(place, forged):
    """Their plans and shapes are equal: one bit of one weight differs."""
    for name in ("here", "elsewhere"):
        shutil.copytree(folder_of(Path("tiny-llama")), place / name)
    weights = place / "elsewhere" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1  # in one of the blocks that a fingerprint reads
    weights.write_bytes(content)
    words = (f"model={{weights: {place}/here}}", "log.jsonl=log.jsonl")
    ended(forged(place, "train", "megatron.yaml", *words, planted=OTHER_WEIGHTS), 1, "the ranks hold different weights")
    assert not (place / "log.jsonl").exists()
