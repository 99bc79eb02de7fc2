"""A rank of three that share micro-batches or experts, one of them with a fault in the middle of an exchange.

exchange_fault_jobs.py CASE
"""

import json
import os
import signal
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.recipe.recipe import parse
from evenload.integrations.megatron import open_host
from evenload.runtime.stage.executor import Executor
from evenload.runtime.watchdog.watchdog import Watchdog
from evenload.runtime.world.plane import Plane
from evenload.runtime.world.world import init_world

RANKS, VICTIM = 3, 1
LENGTHS = (48, 30, 36, 12)


def the_plan():
    """Two rings of all three ranks, one of two of them, and work of its own for the third, by turns."""
    pieces = [Slice(i, 0, n) for i, n in enumerate(LENGTHS)]
    micro_batches = (
        MicroBatch((pieces[0],), (0, 1, 2), cp_comm="ring"),
        MicroBatch((pieces[1],), (2, 1), cp_comm="ring"),
        MicroBatch((pieces[3],), (0,)),
        MicroBatch((pieces[2],), (1, 0, 2), cp_comm="ring"),
    )
    return check(StepPlan(as_lengths(LENGTHS), micro_batches, Limits(RANKS, 1 << 20)))


def plan_of_experts():
    """A micro-batch of its own for each rank, and a second one, in step."""
    pieces = [Slice(i % 4, 0, LENGTHS[i % 4]) for i in range(4)]
    batches = [MicroBatch((piece,), (rank,)) for piece, rank in zip(pieces, (0, 1, 2, 0), strict=True)]
    batches += [MicroBatch((), (rank,)) for rank in (1, 2)]
    return check(StepPlan(as_lengths(LENGTHS), tuple(batches), Limits(RANKS, 1 << 20, in_step=RANKS)))


def at_all_to_all(number, act):
    """The rank does something else first when it is about to run its ``number``-th all-to-all from here on."""
    exchange, exchanges = dist.all_to_all_single, [0]

    def exchanging(*arguments, **named):
        exchanges[0] += 1
        if exchanges[0] == number:
            act()
        return exchange(*arguments, **named)

    dist.all_to_all_single = exchanging


def killed():
    """Long enough after its last mark that a heartbeat has told it."""
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def at_hop(number, act):
    """The rank does something else first when it is about to post the ``number``-th messages from here on."""
    post, posts = Plane.post, [0]

    def posting(self, *arguments):
        posts[0] += 1
        if posts[0] == number:
            act()
        return post(self, *arguments)

    Plane.post = posting


def slowed():
    """Every message of this rank is late."""
    post = Plane.post

    def late(self, *arguments):
        time.sleep(0.05)
        return post(self, *arguments)

    Plane.post = late


def reordered():
    """The rank holds the same plan and walks its passes in another order."""
    init = Executor.__init__

    def wrong(self, *arguments, **named):
        init(self, *arguments, **named)
        self._program = (*self._program[2:4], *self._program[:2], *self._program[4:])

    Executor.__init__ = wrong


MIDDLE = 9
"""Of a step: behind the check of the first ring, inside one of its layers."""


FAULTS = {
    "hung": lambda: at_hop(MIDDLE, lambda: time.sleep(1000)),
    "slow": slowed,
    "other order": reordered,
    "experts hung": lambda: at_all_to_all(5, lambda: time.sleep(1000)),
    "experts killed": lambda: at_all_to_all(5, killed),
    "experts other plan": lambda: None,
}


def work(case):
    rank = dist.get_rank()
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 96}
    experts = case.startswith("experts")
    if experts:
        model |= {"family": "mixtral", "moe": {"num_experts": 6, "topk": 2}}
    layout, train = {"ep": RANKS if experts else 1}, {"dtype": "fp64", "seed": 7}
    recipe = parse({"trainer": "megatron", "model": model, "parallel": layout, "train": train})
    samples = [np.random.default_rng(i).integers(0, 96, n) for i, n in enumerate(LENGTHS)]
    host = open_host(recipe, init_world())
    plan = plan_of_experts() if experts else the_plan()
    good, _ = host.gradients(plan, samples.__getitem__)  # undisturbed: the groups are there then, all are in step
    if rank == VICTIM:
        FAULTS[case]()
        if case == "experts other plan":
            plan = plan.revised(recompute=((1,) * len(plan.micro_batches),))
    stuck_s = 3.0 if case.endswith("hung") else 60.0
    with Watchdog(gone_s=4.0, stuck_s=stuck_s, every_s=0.2) as dog:
        result = host.train_step(plan, samples.__getitem__, lr=1e-3, mark=dog.at)
    print(json.dumps([[r.loss, r.grad_norm] for r in (good, result)]), flush=True)
    host.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work(sys.argv[1])
