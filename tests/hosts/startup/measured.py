"""What a process of a script computed: tokens, seconds of steps, memory, and all that Transformers' Trainer logged.

`sitecustomize` imports it where HOSTS_MEASURED names a folder; every process that trains leaves ``RANK.json`` there.
"""

import atexit
import json
import os
import time
from collections import Counter

import wrapt

tokens, steps, log, searching, at_first = Counter(), [], [], Counter(), {}
"""Places of input by embedding; `STEP` of each update; what was logged; seconds in the search for what rows begin with,
and how deep it is in calls; bytes that are resident at the end of the first update."""
STEP = ("steps", "computed", "cpu_s", "search_s")
"""Of each update the seconds at its end, and places of input, CPU seconds and seconds of searches until then."""


def note_step(*_: object) -> None:
    """After an optimizer's step, of which DeepSpeed takes several for one update."""
    computed = max(tokens.values(), default=0)
    if not steps or steps[-1][1] != computed:
        if not steps:
            begin_peak()
        steps.append((time.perf_counter(), computed, time.process_time(), searching["s"]))


def resident_bytes(key):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(f"{key}:"))


def begin_peak() -> None:
    """Forget the peak of what was resident until now, where the system lets a process do that."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        at_first["VmRSS"] = resident_bytes("VmRSS")
    except OSError:
        pass


def leave() -> None:
    if steps:
        path = os.path.join(os.environ["HOSTS_MEASURED"], os.environ.get("RANK", "0") + ".json")
        by_step = dict(zip(STEP, zip(*steps, strict=True), strict=True))
        peak = {"peak_bytes": resident_bytes("VmHWM") - at_first["VmRSS"]} if at_first else {}
        with open(path, "w") as file:
            json.dump({"tokens": steps[-1][1], **by_step, **peak, "log": log}, file)


@wrapt.when_imported("torch.optim.optimizer")
def _count(module):
    import torch

    embed = torch.nn.Embedding.forward

    def forward(self, input):
        if self.training and torch.is_grad_enabled():
            tokens[id(self)] += input.numel()
        return embed(self, input)

    torch.nn.Embedding.forward = forward
    module.register_optimizer_step_post_hook(note_step)


@wrapt.when_imported("transformers.trainer")
def _keep_log(module):
    plain = module.Trainer.log

    def keep(self, logs, *words):
        log.append({"step": self.state.global_step, **logs})
        plain(self, logs, *words)

    module.Trainer.log = keep


def timed(search):
    def run(*words):
        begin_s, searching["depth"] = time.perf_counter(), searching["depth"] + 1
        try:
            return search(*words)
        finally:
            searching["depth"] -= 1
            searching["s"] += 0 if searching["depth"] else time.perf_counter() - begin_s

    return run


@wrapt.when_imported("evenload.core.plan.trie")
def _time_tries(module):
    module.trie_of = timed(module.trie_of)


@wrapt.when_imported("evenload.integrations.huggingface.units")
def _time_branches(module):
    module.Unit.branch = property(timed(module.Unit.branch.fget))


atexit.register(leave)
