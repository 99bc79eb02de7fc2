"""Each of NCCL's rules between ranks by a program that breaks it, though gloo brings it to its end, and by one that
does not. What one rank can break alone is in test_rules.py."""

from typing import NamedTuple

import pytest

from .nccl import RULES, broken
from .seen import seen_in
from .test_recipes import RECIPES, SMALL
from .test_rules import ACTS as BROKEN_BY_ONE

pytestmark = pytest.mark.slow

HEAD = """
import os
import torch, torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend, recv, send
os.environ["REHEARSAL_ABORT_S"] = "0.5"
r = int(os.environ["RANK"])
o = 1 - r
torch.cuda.set_device(r)
dist.init_process_group("cpu:gloo,cuda:nccl")
a, b = dist.new_group(), dist.new_group()
x, y, z = torch.ones(3, device="cuda"), torch.zeros(5, device="cuda"), torch.zeros(3, device="cuda")

def both(*works):
    return [work.wait() for work in works]

"""
END = "\ntorch.cuda.synchronize()\nos._exit(0)\n"


class Act(NamedTuple):
    rule: str
    program: str
    says: str = ""
    """Of what is broken; nothing where nothing is."""
    ranks: int = 2
    one_queue: bool = False


MET = "dist.all_reduce(x)\n"
"""The first call of a communicator."""
PAIRS = "for g in (a, b): send(x, 1, group=g) if r == 0 else recv(z, 0, group=g)\n"
"""The first calls of two communicators of two ranks."""
LINKS = "g, h = (a, b) if r else (b, a)\n"
TWICE = "both(isend(x, o, group=g), isend(x, o, group=g), irecv(z, o, group=h), irecv(y[:3], o, group=h))"
ACTS = {
    "both are asked to send first": Act(
        "pairs", "works = isend(x, o, group=a), irecv(z, o, group=a); both(*works)", "never ends [['send'"
    ),
    "one is asked to send first and the other to receive": Act(
        "pairs", "g = [lambda: isend(x, o, group=a), lambda: irecv(z, o, group=a)][:: 1 - 2 * r]; both(g[0](), g[1]())"
    ),
    "both send in one group call what they receive in the next": Act(
        "pairs",
        MET + "both(*batch_isend_irecv([P2POp(isend, x, o)]), *batch_isend_irecv([P2POp(irecv, z, o)]))",
        "never ends [['send'",
    ),
    "both send and receive in one group call": Act(
        "pairs", MET + "both(*batch_isend_irecv([P2POp(isend, x, o), P2POp(irecv, z, o)]))"
    ),
    "each direction has a communicator": Act(
        "pairs", PAIRS + LINKS + "both(isend(x, o, group=g), irecv(z, o, group=h))"
    ),
    "a message and a collective in two orders": Act(
        "pairs",
        MET + "works = batch_isend_irecv([P2POp(isend, x, 1)]) if r == 0 else []\ndist.all_reduce(y)\n"
        "both(*(batch_isend_irecv([P2POp(irecv, z, 0)]) if r else works))",
        "rank 0 never ends [['send', 1, 3]]",
    ),
    "two communicators in two orders": Act(
        "orders",
        "both(*(dist.all_reduce(x if g is a else y, group=g, async_op=True) for g in ((a, b) if r else (b, a))))",
        "call 0 is ",
    ),
    "a first call in which one has no part": Act(
        "first call",
        "both(*batch_isend_irecv([P2POp(isend, x, o), P2POp(irecv, z, o)])) if r < 2 else None",
        "never ends",
        ranks=3,
    ),
    "first calls in two orders": Act(
        "first call", LINKS + "both(isend(x, o, group=g), irecv(z, o, group=h))", "never ends [['send'"
    ),
    "a second message behind one that nobody has taken": Act(
        "one queue", PAIRS + LINKS + TWICE, "never ends [['send'", one_queue=True
    ),
    "the same where streams have queues of their own": Act("one queue", PAIRS + LINKS + TWICE),
    "ranks without anything to send": Act(
        "counts",
        "out = torch.empty(3 * r, device='cuda'); left, came = ([[0, 3], [0, 0]][r], [[0, 0], [3, 0]][r])\n"
        "dist.all_to_all_single(out, x[:sum(left)], came, left); assert out.sum().item() == 3 * r",
    ),
}


@pytest.mark.parametrize("name", ACTS)
def test_what_nccl_never_ends_is_noticed(forge, tmp_path, name):
    act = ACTS[name]
    done = run(forge, tmp_path, act.program, act.ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = seen_in(done.outputs)
    assert not seen.faults
    says = broken(seen.units, act.one_queue)
    assert act.says in "; ".join(says) if act.says else not says


def run(forge, folder, program, ranks=2):
    script = folder / "script.py"
    script.write_text(HEAD + program + END)
    return forge("cuda+torch").run(folder, (), ranks, script=script, limit_s=60)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("for t in ((x, y) if r else (y, x)): dist.all_reduce(t)", "is all_reduce float32 RedOpType.SUM "),
        ("dist.all_to_all_single(z, x, [1, 2], [1, 2] if r else [2, 1])", "sends and expects [1, "),
    ],
)
def test_a_call_that_differs_is_refused_at_once(forge, tmp_path, program, says):
    done = run(forge, tmp_path, program)
    assert done.returncode
    assert f"call 0 of nccl [0, 1] of 0 {says}" in done.stderr


def test_counts_that_differ_are_noticed():
    ranks = [0, 1]
    units = {
        rank: [{"of": "nccl", "ranks": ranks, "what": "all_to_all_single", "counts": counts, "after": {}}]
        for rank, counts in enumerate(([[1, 2], [1, 0]], [[1, 4], [2, 4]]))
    }
    assert broken(units) == ["rank 1 sends rank 0 [1] by ['nccl', 'all'], which expects [0]"]
    units[1][0]["counts"][0][0] = 0
    assert not broken(units)


DIES = """
import os, signal
from evenload.runtime.watchdog import watchdog
at = watchdog.Watchdog.at
def dying(self, where, step=None, waits=False):
    at(self, where, step, waits)
    if os.environ["RANK"] == "1" and step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
watchdog.Watchdog.at = dying
os.environ |= {environment!r}
"""
HANDLED = {
    "a minute later": {"REHEARSAL_ABORT_S": "60"},
    "not at all": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
    "by an error": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"},
}
"""How NCCL would end a rank whose peer is gone."""


@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.cuda) for how in HANDLED])
def test_a_rank_that_dies_ends_the_job_with_one_message(forge, tmp_path, how):
    planted = DIES.replace("{environment!r}", repr(HANDLED[how]))
    words = ("train", str(RECIPES / "slices.yaml"), *SMALL, "safety.gone_s=4")
    done = forge("cuda+megatron").run(tmp_path, words, 2, planted)
    assert [line[:24] for line in done.stderr.splitlines() if " is gone" in line] == ["evenload: rank 1 of 2 (v"]
    assert "Traceback" not in done.stderr


ONE_QUEUE = "import os; os.environ['CUDA_DEVICE_MAX_CONNECTIONS'] = '1'\n"
AT_ONCE = "from evenload.runtime.stage import stage_links\nstage_links.has_one_queue = lambda _: False\n"


@pytest.mark.cuda
@pytest.mark.parametrize("planted", ["", AT_ONCE], ids=["in turns", "at once"])
def test_stages_whose_devices_have_one_queue(forge, tmp_path, planted):
    words = ("train", str(RECIPES / "pipeline.yaml"), *SMALL)
    done = forge("cuda+megatron").run(tmp_path, words, 2, ONE_QUEUE + planted)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = seen_in(done.outputs)
    assert seen.one_queue
    assert bool(broken(seen.units, one_queue=True)) is bool(planted), "one queue"


BY_ONE_RANK = {
    "one thread": "a collective of a second thread",
    "layout": "a collective of what is not contiguous",
    "watchers": "a watchdog that waits for the device",
    "own device": "a device that a thread has not set",
}
BY_A_RUN = {
    "order": test_a_call_that_differs_is_refused_at_once,
    "counts": test_counts_that_differ_are_noticed,
    "abort": test_a_rank_that_dies_ends_the_job_with_one_message,
}


def test_every_rule_is_broken_in_a_test():
    assert {act.rule for act in ACTS.values() if act.says} | BY_ONE_RANK.keys() | BY_A_RUN.keys() == RULES.keys()
    assert {*BY_ONE_RANK.values()} <= BROKEN_BY_ONE.keys()
