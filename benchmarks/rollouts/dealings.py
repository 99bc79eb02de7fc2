"""What ranks of a real engine compute where samples are dealt in five forms, counted; seconds by measured costs.

    python benchmarks/rollouts/dealings.py --costs COSTS [--ranks 2] [--prompts 16] [--samples 8] [--limit 512]
                                           [--slots 64] [--every 16] [--draws 3] [--json] [--out FILE]

    groups        all samples of a prompt on one rank, prompts in turn: what verl, TRL and DeepSpeed do
    spread        samples in turn
    tie           by distributions of 5 earlier samples of each prompt
    ... moved     the same, dealt again after every so many decode steps

The model of recipes/quickstart.yaml, untrained; lengths are drawn (a median of each prompt, log-normal with 0.8 about
an eighth of the limit; samples log-t about it with 0.45), and samples end there. Forwards, tokens and keys are counted
where the model is called. Seconds are predicted: COSTS (of `evenload profile`) times these counts; from border to
border ranks wait for the slowest one. CPU seconds are measured, all ranks together, whatever else runs.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from evenload.benchmarks.frame import columns, main, means, options, started
from evenload.core.aliases import Floats, Ints

PROMPT = 8


def drawn(asked: argparse.Namespace, draw: int) -> tuple[Ints, Ints]:
    """Lengths of the samples [P, G] and of earlier ones [P, 5]."""
    random = np.random.default_rng(draw)
    mu = np.log(asked.limit / 8) + 0.8 * random.normal(size=(asked.prompts, 1))
    own, earlier = (
        np.exp(mu + 0.45 * random.standard_t(3.5, size=(asked.prompts, count))) for count in (asked.samples, 5)
    )
    return tuple(np.clip(one, 2, asked.limit).astype(np.int64) for one in (own, earlier))  # type: ignore[return-value]


def variants(asked: argparse.Namespace, lengths: Ints, earlier: Ints, costs: Any) -> dict[str, Any]:
    """Dealers by name. To them a sample is one of its prompt, with the limit of all."""
    from evenload.runtime.generate.dealing import Dealer, Dealing, Dealt, Ran
    from evenload.runtime.generate.request import Completion, Request
    from evenload.training.run.dealing import ByLength

    numbers = tuple(range(asked.samples))
    prompts = [Request(number, (1,) * PROMPT, asked.limit, numbers) for number in range(asked.prompts)]
    known = [
        Completion(prompt, 0, (0,) * int(tokens), (), "limit" if tokens == asked.limit else "end")
        for prompt, row in enumerate(earlier)
        for tokens in row
    ]

    class Groups(Dealer):
        def deal(self, dealing: Dealing) -> Dealt:
            ranks = dealing.of % dealing.num_ranks
            return replace(dealing, ranks=ranks).as_it_is

    class OfPrompts(Dealer):
        def __init__(self, dealer: Dealer) -> None:
            self._dealer = dealer

        def deal(self, dealing: Dealing) -> Dealt:
            of, number = np.divmod(dealing.of, asked.samples)
            return self._dealer.deal(replace(dealing, requests=prompts, of=of, numbers=number))

        def ran(self, ran: Ran) -> None:
            self.counted = ran

    dealers = {
        "groups": Groups(),
        "spread": ByLength(costs, (), 0),
        "tie": ByLength(costs, known, 0),
        "spread, moved": ByLength(costs, (), asked.every),
        "tie, moved": ByLength(costs, known, asked.every),
    }
    return {name: OfPrompts(dealer) for name, dealer in dealers.items()}


def on_rank(asked: argparse.Namespace) -> None:
    from evenload.api import load_recipe
    from evenload.core.costs import costs as cost_models
    from evenload.patches import bridge_cpu
    from evenload.plugins.rollout import RolloutCosts, RolloutRequest, bound_of
    from evenload.runtime.generate.request import Generation, Request
    from evenload.runtime.world.agreement import everyone
    from evenload.runtime.world.world import init_world
    from evenload.training.hosts import integration

    bridge_cpu()
    decode = cost_models.load(str(asked.costs), Path()).decode
    costs = RolloutCosts(**decode.model_dump(exclude={"fit_error"}))
    words = ["parallel.dp=null", "model.vocab_size=256", f"data.max_length={PROMPT + asked.limit}"]
    host = integration("megatron").open_host(load_recipe("quickstart", words), init_world())
    rows = []
    for draw in range(asked.draws):
        lengths, earlier = drawn(asked, draw)
        flat = lengths.ravel()
        requests = [Request(number, (1,) * PROMPT, int(tokens)) for number, tokens in enumerate(flat)]
        sizes = np.full(len(lengths), PROMPT)
        of = np.repeat(np.arange(len(lengths)), lengths.shape[1])
        request = RolloutRequest(of, sizes, asked.ranks, asked.limit, asked.slots, 1 << 40)
        bound_s = bound_of(request, flat, costs).bound_s
        texts = set()
        for name, dealer in variants(asked, lengths, earlier, decode).items():
            begin = time.process_time()
            samples = host.generate(requests, Generation(slots=asked.slots), dealer=dealer)
            cpu_s = sum(everyone(time.process_time() - begin))
            texts.add(hash(tuple(sample.tokens for sample in samples)))
            rows.append(
                {"draw": draw, "name": name, "bound_s": bound_s, "cpu_s": cpu_s, **counts(dealer.counted, costs)}
            )
        assert len(texts) == 1, "samples differ"
    host.close()
    if host.dp_cp_rank == 0:
        print(json.dumps({"rows": rows, "decode": decode.model_dump()}))


def counts(ran: Any, costs: Any) -> dict[str, Any]:
    """What ranks computed, and what that takes by the costs."""
    work = np.array(ran.work, dtype=np.float64)
    rank_s: Floats = work @ np.array([costs.step_s, costs.row_s, costs.key_s, costs.prompt_s])
    seconds = float(rank_s.max(axis=0).sum())
    of_ranks = work.sum(axis=1)
    return {
        "forwards": of_ranks[:, 0].tolist(),
        "tokens": of_ranks[:, 1].tolist(),
        "computed_again": ran.moved_tokens,
        "moved": ran.moved,
        "predicted_s": seconds,
        "idle": 1 - float(rank_s.sum(axis=1).mean()) / seconds,
    }


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    """Of all ranks, started by torchrun: means of draws."""
    result = started(__file__, asked.ranks)
    by_name: dict[str, list[Any]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["name"], []).append(row)
    keys = ("forwards", "tokens", "predicted_s", "bound_s", "idle", "moved", "computed_again", "cpu_s")
    mean = {name: means([{key: np.max(row[key]) for key in keys} for row in rows]) for name, rows in by_name.items()}
    gain = {name: mean["groups"]["predicted_s"] / row["predicted_s"] for name, row in mean.items()}
    return {**result, "means": mean, "gain": gain}


def table(result: dict[str, Any]) -> Any:
    cells = {
        "": "{name}",
        "forwards": "{forwards:.0f}",
        "tokens": "{tokens:.0f}",
        "predicted": "{predicted_s:.2f} s",
        "over groups": lambda row: f"{result['gain'][row['name']]:.2f}x",
        "idle": "{idle:.1%}",
        "over the bound": lambda row: f"{row['predicted_s'] / row['bound_s'] - 1:.1%}",
        "moved": "{moved:.0f}",
        "tokens again": "{computed_again:.0f}",
        "CPU": "{cpu_s:.1f} s",
    }
    rows = [{"name": name, **row} for name, row in result["means"].items()]
    return columns("busiest rank, means of draws; seconds predicted, CPU measured", rows, cells)


if __name__ == "__main__":
    sizes = {"ranks": 2, "prompts": 16, "samples": 8, "limit": 512, "slots": 64, "every": 16, "draws": 3}
    own = options(__doc__, **sizes)
    own.add_argument("--costs", type=Path, required=True, help="a file that `evenload profile` has written")
    main(own, benchmark, table, on_rank)
