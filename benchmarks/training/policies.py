"""What policies of data cost: a step of every mix, and the projection of gradients. Measured, CPU of one core.

    python benchmarks/training/policies.py [--domains 8] [--steps 700] [--json]

mix         CPU ms of a step, JSON of the state included: median of the second half, the largest (ado fits every 100th
            from step 600 on, of as many points as a state holds), and bytes of the state
sums        CPU ms of the sums by domain of 512 sequences
projection  CPU seconds of 100,000 elements to 4,096 columns, of one gradient and of sixteen at once
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import torch
from evenload.api import load_plugins
from evenload.benchmarks.frame import columns, main, options, timed
from evenload.core.policies import DomainsToMix, SeenDomains, chosen_policy, seen_domains, started, stepped
from evenload.core.registry import data_policies
from evenload.runtime.adapters.projection import projection

SETTINGS = {"ado": {"skip_steps": 0, "warmup_steps": 600}}


def of_mix(name: str, count: int, steps: int) -> dict[str, Any]:
    rng, times = np.random.default_rng(0), []
    chosen = chosen_policy("mix", name, SETTINGS.get(name, {}), data_policies("mix"))
    names = tuple(f"domain-{number:02}" for number in range(count))
    state, answer = started(chosen, DomainsToMix(names, (1 / count,) * count, (1000,) * count))
    for _ in range(steps):
        targets = rng.integers(500, 1500, count)
        seen = SeenDomains(targets * rng.uniform(1, 3, count), targets, targets // 100, targets * 0.1)
        begin = time.process_time()
        state, answer = stepped(chosen, state, seen, answer)
        times.append(1e3 * (time.process_time() - begin))
    half = times[steps // 2 :]
    return {"mix": name, "ms": float(np.median(half)), "most_ms": max(half), "state_bytes": len(json.dumps(state))}


def benchmark(asked: Any) -> dict[str, Any]:
    load_plugins()
    torch.set_num_threads(1)
    rng, places = np.random.default_rng(0), torch.arange(100_000)
    domain, losses, targets = rng.integers(0, asked.domains, 512), rng.uniform(0, 9, 512), rng.integers(1, 99, 512)
    gradients = torch.tensor(rng.normal(size=(16, len(places))), dtype=torch.float32)
    return {
        "domains": asked.domains,
        "mixes": [of_mix(name, asked.domains, asked.steps) for name in sorted(data_policies("mix"))],
        "sums_ms": 1e3 * timed(lambda: seen_domains(asked.domains, domain, losses, targets), 100)[1],
        "one_s": timed(lambda: projection("w", gradients[0], places, 4096), 1)[1],
        "sixteen_s": timed(lambda: projection("w", gradients, places, 4096), 1)[1],
    }


def table(result: dict[str, Any]) -> Any:
    cells = {"mix": "{mix}", "a step": "{ms:.3f} ms", "the longest": "{most_ms:.1f} ms"}
    caption = (
        f"sums of 512 sequences {result['sums_ms']:.2f} ms; a projection {result['one_s']:.1f} s, "
        f"of sixteen {result['sixteen_s']:.1f} s"
    )
    cells |= {"bytes of state": "{state_bytes:,}"}
    return columns(f"{result['domains']} domains", result["mixes"], cells, caption)


if __name__ == "__main__":
    main(options(__doc__, domains=8, steps=700), benchmark, table)
