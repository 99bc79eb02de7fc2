"""Whether attention of a small model has blocks that can be left out, and whether they stay where they are: measured.

    python benchmarks/sparse/structure.py [--steps 240] [--layers 3] [--hidden 128] [--mass 0.9] [--json] [--out FILE]

A model of bytes is trained here on the sources of Python's standard library (files of 32 KiB and more; every tenth is
held out), samples of 1,024 to 12,288 bytes, on one rank of DeepSpeed, float32. Then:

overlap    every 25 steps of the last 100, `kept` chooses blocks for held-out samples: which share of the blocks that it
           chooses now it had chosen at the validation before, and which share at the first of them. "chance": what as
           many blocks anywhere would have in common. The first block, which is always kept, is not counted.
stale      the loss of a pass with blocks of 25 and of 100 steps before over that of a dense pass, less 1
error      the same of every chooser by its ``mass``, at the last weights; "pairs" is the share that was computed. At
           the work of `kept`: `tiers`, AdaSpa's own (a fixed share in each row, heads of more mass a half of it, heads
           of less one and a half); with as many blocks in each row the last ones (`window`), any (`random`), and those
           of XAttention's antidiagonals, of every 16th query and key (arXiv 2503.16428)
"""

from __future__ import annotations

import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evenload.benchmarks.chains import plugins, recipe_of
from evenload.benchmarks.frame import columns, machine, main, options
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.runtime.attention.choosers import CHOOSERS, BlockChoice, Chooser, block_mass, kept
from evenload.runtime.attention.sparse import KeptBlocks, SparsePass
from evenload.runtime.world.world import init_world

with redirect_stdout(sys.stderr):  # DeepSpeed writes there which accelerator it takes
    from evenload.integrations.deepspeed import open_host

LONGEST, MASSES = 32768, (0.8, 0.9, 0.95)
Score = Callable[[BlockChoice, int, torch.Tensor], torch.Tensor]
"""Of a query block, by its number, and what is kept so far: the best blocks have the highest [groups, blocks]."""


def recipe_for(asked: Any) -> Any:
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 256}
    return recipe_of(
        {
            "trainer": "deepspeed",
            "model": {"num_layers": asked.layers, "hidden_size": asked.hidden, **heads},
            "data": {"max_length": LONGEST},
            "parallel": {"dp": 1},
            "costs": "cpu",
            "deepspeed": {"zero_stage": 0},
            "plugins": plugins(LONGEST, "packing"),
        }
    )


def files() -> list[np.ndarray]:
    """The long sources of the standard library, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    long = [path.read_bytes() for path in paths if path.stat().st_size >= LONGEST]
    return [np.frombuffer(text, dtype=np.uint8).astype(np.int64) for text in long]


def batch_of(texts: list[np.ndarray], step: int, tokens: int) -> list[np.ndarray]:
    """Samples of so many tokens in all, their lengths drawn evenly on a logarithmic scale."""
    draw, samples, left = np.random.default_rng(step), [], tokens
    while left >= 1024:
        length = min(left, int(np.exp(draw.uniform(*np.log((1024, tokens))))))
        text = texts[draw.integers(len(texts))]
        first = draw.integers(0, len(text) - length + 1)
        samples.append(text[first : first + length])
        left -= length
    return samples


class Scorer:
    """Passes without gradients over held-out samples."""

    def __init__(self, host: Any, chain: PlanChain, samples: list[np.ndarray]) -> None:
        self._host, self._samples = host, samples
        self._plan = chain.plan(as_lengths(np.array([len(sample) for sample in samples])))

    def loss(self, sparse: SparsePass | None = None) -> float:
        return float(self._host.score(self._plan, self._samples.__getitem__, sparse=sparse).loss)

    def through(self, chooser: Chooser, mass: float, blocks: KeptBlocks | None = None) -> tuple[float, float, float]:
        """The loss, the share of pairs that was computed, and CPU seconds."""
        names = [str(number) for number in range(len(self._samples))]
        run, begin_s = SparsePass(chooser, mass, names, blocks or KeptBlocks()), time.process_time()
        loss, spent_s = self.loss(run), time.process_time() - begin_s
        weights = np.array([float(len(sample)) ** 2 for sample in self._samples])
        return loss, float((run.pairs().computed * weights).sum() / weights.sum()), spent_s


def recording(into: list[torch.Tensor], mass: float) -> Chooser:
    """`kept` at once, which writes down what it chooses."""

    def choose(choice: BlockChoice) -> torch.Tensor:
        into.append(kept(choice._replace(mass=mass)))
        return into[-1]

    return Chooser("recording", choose)


def common(now: list[torch.Tensor], then: list[torch.Tensor]) -> float:
    """The share of the blocks of now that were there then, but for the first of each row."""
    both, own = (sum(int((a & b)[..., 1:].sum()) for a, b in zip(now, x, strict=True)) for x in (then, now))
    return both / own


def by_chance(now: list[torch.Tensor]) -> float:
    """What `common` would be for as many blocks anywhere in each row."""
    both = own = 0.0
    for chosen in now:
        counts = chosen[..., 1:].sum(-1).double()
        places = torch.arange(chosen.shape[1]).mul(8).sub(1).clamp(min=1)
        both, own = both + float((counts**2 / places).sum()), own + float(counts.sum())
    return both / own


def at_equal_work(score: Score, as_in: list[torch.Tensor]) -> Callable[[BlockChoice], torch.Tensor]:
    """As many blocks in each row as other choices have, one for each layer and sample, by another score."""
    counts = iter(as_in)

    def choose(choice: BlockChoice) -> torch.Tensor:
        wanted = next(counts)
        chosen = torch.zeros_like(wanted)
        for number, block in enumerate(choice.query_blocks):
            if not block.begin:
                continue
            num = block.begin // choice.grid.keys
            scores = score(choice, number, chosen).double()
            scores[:, 0] = torch.inf
            places = scores.argsort(-1, descending=True).argsort(-1)
            chosen[:, number, :num] = places < wanted[:, number].sum(-1, keepdim=True)
        return chosen

    return choose


def window(choice: BlockChoice, number: int, chosen: torch.Tensor) -> torch.Tensor:
    num = list(choice.query_blocks)[number].begin // choice.grid.keys
    return torch.arange(num).expand(len(chosen), num).clone()


def by_lot(choice: BlockChoice, number: int, chosen: torch.Tensor) -> torch.Tensor:
    num = list(choice.query_blocks)[number].begin // choice.grid.keys
    return torch.rand(len(chosen), num, generator=torch.Generator().manual_seed(number))


def antidiagonals(choice: BlockChoice, number: int, _: torch.Tensor, stride: int = 16) -> torch.Tensor:
    """Scores of every ``stride``-th antidiagonal: queries and keys whose places add up to a multiple of it, by softmax
    over the keys so grouped."""
    block = list(choice.query_blocks)[number]
    (_, heads, dim), groups = choice.q_NHD.shape, choice.k_MGD.shape[1]
    q = choice.q_NHD[block.first : block.end]
    q = q[: len(q) // stride * stride].view(-1, stride, groups, heads // groups, dim).flip(1)
    k = choice.k_MGD[: block.begin].view(-1, stride, groups, dim)
    sums = torch.einsum("nsgrd,msgd->grnm", q, k).flatten(1, 2) * choice.scale / stride
    return sums.softmax(-1).sum(1).view(groups, -1, choice.grid.keys // stride).sum(-1)


def tiers(choice: BlockChoice) -> torch.Tensor:
    """AdaSpa's: a share of the blocks of each row, the mean of what `kept` has; the heads whose blocks have more mass
    than the mean get half of the share, as many of those with the least one and a half."""
    own = kept(choice)
    chosen, blocks = torch.zeros_like(own), list(choice.query_blocks)
    rooms = [block.begin // choice.grid.keys for block in blocks]
    share = float(own.sum() / (len(own) * sum(rooms)))
    masses = {i: block_mass(choice, block) for i, block in enumerate(blocks) if block.begin}
    recall = torch.zeros(len(own))
    for mass, rest in masses.values():
        top = mass.sort(-1, descending=True)[0][:, : max(1, round(share * mass.shape[1]))].sum(-1)
        recall += (top + rest) / (mass.sum(-1) + rest)
    order, half = recall.argsort(descending=True), len(own) // 2
    shares = torch.full((len(own),), share)
    shares[order[:half]], shares[order[-half:]] = share / 2, min(1.0, 1.5 * share)
    for i, (mass, _) in masses.items():
        mass[:, 0] = torch.inf
        places = mass.argsort(-1, descending=True).argsort(-1)
        chosen[:, i, : rooms[i]] = places < (shares * rooms[i]).round().clamp(min=1)[:, None]
    return chosen


def benchmark(asked: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr):
        recipe = recipe_for(asked)
        host, chain = open_host(recipe, init_world()), PlanChain.of_recipe(recipe, recipe.layout(1))
        texts = files()
        training = [text for i, text in enumerate(texts) if i % 10]
        held = [text[:length] for text, length in zip(texts[::10], (*asked.validated, *asked.lengths), strict=False)]
        often, last = (
            Scorer(host, chain, held[: len(asked.validated)]),
            Scorer(host, chain, held[len(asked.validated) :]),
        )
        overlaps, stores = [], {}
        seen: list[list[torch.Tensor]] = []
        for step in range(asked.steps + 1):
            left = asked.steps - step
            if left <= asked.last and left % asked.every == 0:
                seen.append([])
                loss, pairs, _ = often.through(recording(seen[-1], asked.mass), asked.mass)
                stores[step] = KeptBlocks(search_every=99)
                dense = often.through(CHOOSERS["kept"], asked.mass, stores[step])[0]
                row = {"step": step, "loss": dense, "pairs": pairs, "error": loss / dense - 1}
                if len(seen) > 1:
                    row |= {"before": common(seen[-1], seen[-2]), "first": common(seen[-1], seen[0])}
                    row |= {"chance": by_chance(seen[-1])}
                    for name, then in (("stale", step - asked.every), ("stale_first", asked.steps - asked.last)):
                        row[name] = often.through(CHOOSERS["kept"], asked.mass, stores[then])[0] / dense - 1
                overlaps.append(row)
                print(row, file=sys.stderr, flush=True)
            if step < asked.steps:
                samples = batch_of(training, step, asked.tokens)
                plan = chain.plan(as_lengths(np.array([len(sample) for sample in samples])))
                lr = asked.lr * min(1.0, (step + 1) / 20)
                loss = host.train_step(plan, samples.__getitem__, lr=lr).loss
                if step % 10 == 0:
                    print(step, loss, f"{time.process_time():.0f} CPU s", file=sys.stderr, flush=True)
        rows, dense = [], last.loss()
        others = {"window": window, "random": by_lot, "antidiagonals": antidiagonals}
        for mass in MASSES:
            as_kept: list[torch.Tensor] = []
            rivals = {name: Chooser(name, at_equal_work(score, as_kept)) for name, score in others.items()}
            first = {"kept": recording(as_kept, mass), "sample": CHOOSERS["sample"], "estimate": CHOOSERS["estimate"]}
            for name, chooser in {**first, "tiers": Chooser("tiers", tiers), **rivals}.items():
                if name == "estimate" and mass != asked.mass:
                    continue  # slow on CPUs
                loss, pairs, spent_s = last.through(chooser, mass)
                rows.append(
                    {"mass": mass, "chooser": name, "pairs": pairs, "cpu_s": spent_s, "error": loss / dense - 1}
                )
                print(rows[-1], file=sys.stderr, flush=True)
        host.close()
    settings = {name: getattr(asked, name) for name in ("steps", "layers", "hidden", "mass", "lr", "tokens")}
    return {"machine": machine(), "settings": settings, "loss": dense, "overlaps": overlaps, "errors": rows}


def table(result: dict[str, Any]) -> Any:
    cells = {
        "mass": "{mass}",
        "chooser": "{chooser}",
        "pairs": lambda row: f"{100 * row['pairs']:.0f} %",
        "loss off by": lambda row: f"{100 * row['error']:+.3f} %",
        "CPU s": "{cpu_s:.1f}",
    }
    words = "after {step} steps: loss {loss:.3f}, overlap {before:.3f}, with the first {first:.3f}, chance {chance:.3f}"
    said = [words.format(**row) for row in result["overlaps"] if "before" in row]
    return columns(
        f"blocks of a model of {result['settings']['layers']} layers", result["errors"], cells, "\n".join(said)
    )


if __name__ == "__main__":
    own = options(
        __doc__,
        steps=240,
        layers=3,
        hidden=128,
        mass=0.9,
        lr=2e-3,
        tokens=12288,
        every=25,
        last=100,
        validated=[8192, 8192, 16384],
        lengths=[8192, 16384, 32768],
    )
    main(own, benchmark, table)
