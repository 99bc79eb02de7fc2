"""One rank of a replica that comes and goes, with a model of four numbers: `test_elastic`.

FAULTS, JSON: a signal by "replica/life/rank/step/where". Each step ends with the same numbers, whoever is there.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from evenload.core.errors import EvenloadError
from evenload.runtime.watchdog.orphans import die_with_parent
from evenload.runtime.world.replicas import ReplicasChangedError, commit, everyone_left, job_group, leads
from evenload.runtime.world.roster import take_part
from evenload.runtime.world.world import init_world

STEPS = 30
ALL_HERE = (8, 29)
"""Steps before which those wait that are there until all are."""
FAULTS = json.loads(os.environ["FAULTS"])

die_with_parent()
world = init_world(60.0, 10.0)
member = take_part([{}, {}], 60.0, lambda: None)
weights, done = torch.zeros(4, dtype=torch.float64), []


def at(where):
    if signal := FAULTS.get(f"{member.number}/{member.life}/{world.rank}/{len(done)}/{where}"):
        os.kill(os.getpid(), signal)


def begin():
    standings = member.meet()
    member.begin()
    source = next((rank for rank, one in enumerate(standings) if one.step >= 0), None)
    if source is None:
        done.clear()
        weights.zero_()
    else:
        done[:] = job_group().from_rank(source, done)
        job_group().fill(weights, source)
    member.stands_at(len(done))


def train():
    while len(done) < STEPS:
        while len(done) in ALL_HERE and job_group().size < 3:
            time.sleep(0.05)
            member.next_step(len(done))
        job, gradient = job_group(), torch.zeros_like(weights)
        for sample in range(job.rank, 12, job.size):
            gradient += torch.sin(weights + sample + len(done))
        at("passes")
        job.add_up(gradient)
        at("summed")
        norm = commit(float(gradient.norm()))
        at("committed")
        weights.add_(gradient / norm, alpha=0.1)
        done.append(job.size)
        everyone_left(len(done), lambda value: [value])
        at("told")
        member.next_step(len(done))


try:
    member.arrive({"recipe": os.environ.get("ABOUT", "the same")})
    while True:
        try:
            begin()
            train()
            break
        except ReplicasChangedError:
            pass
except EvenloadError as error:
    print(f"evenload: {error}", file=sys.stderr)
    os._exit(2)
result = json.dumps({"weights": weights.tolist(), "ranks": done})
member.leave(result if leads(world.rank) else None)
dist.barrier()
os._exit(0)
