"""What a process of a script computed: tokens, seconds of steps, and all that Transformers' Trainer logged.

`sitecustomize` imports it where HOSTS_MEASURED names a folder; every process that trains leaves ``RANK.json`` there.
"""

import atexit
import json
import os
import time
from collections import Counter

import wrapt

tokens, steps, log = Counter(), [], []
"""Places of input by embedding; for each update the seconds at its end and the places until then; what was logged."""


def note_step(*_: object) -> None:
    """After an optimizer's step, of which DeepSpeed takes several for one update."""
    computed = max(tokens.values(), default=0)
    if not steps or steps[-1][1] != computed:
        steps.append((time.perf_counter(), computed))


def leave() -> None:
    if steps:
        path = os.path.join(os.environ["HOSTS_MEASURED"], os.environ.get("RANK", "0") + ".json")
        with open(path, "w") as file:
            json.dump({"tokens": steps[-1][1], "steps": [seconds for seconds, _ in steps], "log": log}, file)


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


atexit.register(leave)
