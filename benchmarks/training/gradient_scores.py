"""Losses and gradients of samples from packs, against one sample a pass, as DataFlex takes them: CPU seconds of a core.

    python benchmarks/training/gradient_scores.py [--hidden 64] [--layers 2] [--samples 32] [--batches 6]
                                                  [--columns 1024] [--json] [--out FILE]

One model of Transformers on one rank, float32, LoRA of rank 8 on all linear layers, fresh. Of every batch take turns:

packs      `Host.gradient_scores` on DeepSpeed (ZeRO 0): packs of evenload's plan, a row for each sample, projected
a sample   PEFT's LoRA on the same weights, one sample a forward and a backward, unpadded; gradients projected sixteen
           at a time by the same code (DataFlex holds sixteen, in float16)
losses     `Host.score` of the same plans, against a forward of the plain model for each sample, unpadded
forwards   the products with one direction by two forwards of packs; backward: the same from rows

"scoring" is of losses, "gradients" has no projection in it. Ratios are those of a batch, their median; "off" is the
largest relative difference of a projected row between the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import numpy as np
import torch
from evenload.benchmarks.chains import plugins, recipe_of
from evenload.benchmarks.frame import columns, main, options, timed
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.integrations.host.gradients import GradientScores, GradientSettings, PlannedSamples
from evenload.runtime.adapters.places import Place, drawn
from evenload.runtime.adapters.projection import projection
from evenload.runtime.world.world import init_world

with redirect_stdout(sys.stderr):  # DeepSpeed writes there which accelerator it takes
    from evenload.integrations.deepspeed import open_host
    from evenload.integrations.deepspeed.engine.model import build_model

VOCABULARY, CAP, AT_ONCE = 256, 4096, 16
LENGTHS = {"16 to 128": (16, 128), "128 to 1,024": (128, 1024)}
ADAPTER, TRAIN = Adapter(r=8, lora_alpha=16), TenantTrain()


def recipe_for(asked: Any) -> Any:
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "vocab_size": VOCABULARY}
    return recipe_of(
        {
            "trainer": "deepspeed",
            "model": {"num_layers": asked.layers, "hidden_size": asked.hidden, **heads},
            "data": {"max_length": 1024},
            "parallel": {"dp": 1},
            "costs": "cpu",
            "deepspeed": {"zero_stage": 0},
            "plugins": plugins(CAP, "packing"),
        }
    )


class OneAPass:
    """PEFT's LoRA on the weights of a host; a forward and a backward for each sample."""

    def __init__(self, recipe: Any, weights: Any) -> None:
        from peft import LoraConfig, get_peft_model

        base = build_model(recipe, attn_implementation="sdpa")
        base.load_state_dict(weights)
        linears = sorted({n.rsplit(".", 1)[-1] for n, m in base.named_modules() if isinstance(m, torch.nn.Linear)})
        config = LoraConfig(
            r=ADAPTER.r, lora_alpha=ADAPTER.lora_alpha, target_modules=[n for n in linears if n != "lm_head"]
        )
        self.model = get_peft_model(base, config).eval()
        self.matrices = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                layer, kind = name.removeprefix("base_model.model.").removesuffix(".default.weight").rsplit(".", 1)
                self.matrices[f"{layer}.{kind}"] = parameter
        for name, parameter in self.matrices.items():
            layer, kind = name.rsplit(".", 1)
            other = self.matrices[f"{layer}.{'lora_B' if kind == 'lora_A' else 'lora_A'}"]
            a, b = (parameter, other) if kind == "lora_A" else (other, parameter)
            place = Place(layer, b.shape[0], a.shape[1], (0, b.shape[0]), (0, a.shape[1]))
            parameter.data.copy_(drawn(place, kind, ADAPTER.r, TRAIN.seed))

    def gradients(self, samples: PlannedSamples) -> list[dict[str, torch.Tensor]]:
        rows = []
        for number in range(len(samples.plan.lengths)):
            tokens = torch.from_numpy(samples.tokens_of(number))[None]
            self.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            rows.append({name: matrix.grad for name, matrix in self.matrices.items()})
            for matrix in self.matrices.values():
                matrix.grad = None
        return rows

    def projected(self, rows: list[dict[str, torch.Tensor]], columns: int) -> np.ndarray:
        parts = []
        for first in range(0, len(rows), AT_ONCE):
            some = rows[first : first + AT_ONCE]
            of_each = (
                projection(name, torch.stack([row[name].flatten() for row in some]), torch.arange(g.numel()), columns)
                for name, g in some[0].items()
            )
            parts.append(sum(of_each))
        return torch.cat(parts).numpy()


def taken(work: Callable[[], Any]) -> tuple[float, Any]:
    value, cpu_s = timed(work, 1)
    return cpu_s, value


def batches_of(chain: PlanChain, span: tuple[int, int], asked: Any) -> list[PlannedSamples]:
    """Lengths are drawn evenly on a logarithmic scale; tokens with a structure, so that gradients differ by sample."""
    batches = []
    for number in range(asked.batches + 1):
        draw = np.random.default_rng((span[0], number))
        lengths = np.exp(draw.uniform(*np.log(span), asked.samples)).astype(np.int64)
        steps = draw.integers(1, 7, asked.samples)
        tokens = [(draw.integers(0, 9, n) + np.arange(n) * s) % VOCABULARY for n, s in zip(lengths, steps, strict=True)]
        batches.append(PlannedSamples(chain.plan(as_lengths(lengths)), tokens.__getitem__))
    return batches


def scoring_of(host: Any, plain: Any, batches: list[PlannedSamples]) -> dict[str, float]:
    """How often the losses of a batch by packs go into those by one sample a forward, and by what these differ."""

    @torch.no_grad()
    def one_a_pass(samples: PlannedSamples) -> np.ndarray:
        tokens = [torch.from_numpy(samples.tokens_of(number))[None] for number in range(len(samples.plan.lengths))]
        losses = [plain(input_ids=own, labels=own, use_cache=False).loss * (own.numel() - 1) for own in tokens]
        return torch.stack(losses).double().numpy()

    ratios, off = [], 0.0
    for number, samples in enumerate(batches):
        methods: list[Callable[[], Any]] = [
            lambda samples=samples: host.score(samples.plan, samples.tokens_of).losses,
            lambda samples=samples: one_a_pass(samples),
        ]
        order = (0, 1) if number % 2 else (1, 0)
        spent = {place: taken(methods[place]) for place in order}
        ratios.append(spent[1][0] / spent[0][0])
        off = max(off, float(np.abs(spent[0][1] / spent[1][1] - 1).max()))
    return {"scoring": float(np.median(ratios[1:])), "losses_off": off}


def row_of(scores: GradientScores, other: OneAPass, batches: list[PlannedSamples], columns: int) -> dict[str, Any]:
    direction = scores.direction(batches[:1])
    by_forwards = scores.along(direction, batches[:2], "forwards")
    rows: list[dict[str, float]] = []
    for number, samples in enumerate(batches):
        methods: dict[str, Callable[[], Any]] = {
            "packs": lambda samples=samples: scores.projected(samples)[0],
            "backward": lambda samples=samples: scores.along(direction, [samples], "backward").products,
            "forwards": lambda samples=samples: scores._by_forwards(by_forwards.step, direction, samples),
            "a sample": lambda samples=samples: other.gradients(samples),
        }
        names = list(methods)[number % 4 :] + list(methods)[: number % 4]
        done = {name: taken(methods[name]) for name in names}
        spent, theirs = taken(partial(other.projected, done["a sample"][1], columns))
        ours, along, wanted = (done[name][1] for name in ("packs", "forwards", "backward"))
        row = {f"{name}_s": done[name][0] for name in methods} | {"a sample, projected_s": done["a sample"][0] + spent}
        row["off"] = float((np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)).max())
        row["forwards_off"] = float(np.linalg.norm(along - wanted) / np.linalg.norm(wanted))
        row["forwards_ranks"] = float(np.corrcoef(along.argsort().argsort(), wanted.argsort().argsort())[0, 1])
        row["tokens"] = int(samples.plan.lengths.sum())
        rows.append(row)
    rows = rows[1:]  # the first warms up
    ratio = lambda over, under: float(np.median([row[over] / row[under] for row in rows]))  # noqa: E731
    worst = {key: max(row[key] for row in rows) for key in ("off", "forwards_off")}
    return {
        "gradients": ratio("a sample_s", "backward_s"),
        "projected": ratio("a sample, projected_s", "packs_s"),
        "forwards_over_backward": ratio("forwards_s", "backward_s"),
        **worst,
        "forwards_ranks": min(row["forwards_ranks"] for row in rows),
        "step": by_forwards.step,
        "differs": by_forwards.differs,
        "rows": rows,
    }


def benchmark(asked: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    recipe = recipe_for(asked)
    world = init_world()
    host = open_host(recipe, world)
    chain = PlanChain.of_recipe(recipe, recipe.layout(1))
    other, plain = OneAPass(recipe, host.weights()), build_model(recipe, attn_implementation="sdpa").eval()
    plain.load_state_dict(host.weights())
    batches = {name: batches_of(chain, span, asked) for name, span in LENGTHS.items()}
    scoring = {name: scoring_of(host, plain, own) for name, own in batches.items()}
    result: dict[str, Any] = {"hidden": asked.hidden, "layers": asked.layers, "columns": asked.columns, "lengths": {}}
    try:
        with host.gradient_scores(GradientSettings(ADAPTER, asked.columns)) as scores:
            for name, own in batches.items():
                result["lengths"][name] = {**scoring[name], **row_of(scores, other, own, asked.columns)}
    finally:
        host.close()
    return result


def table(result: dict[str, Any]) -> Any:
    rows = []
    for name, row in result["lengths"].items():
        median = {key: np.median([one[key] for one in row["rows"]]) for key in ("a sample_s", "backward_s")}
        rows.append({"tokens": name, **row, **median})
    cells = {
        "tokens": "{tokens}",
        "scoring": "{scoring:.1f} x",
        "a sample a pass": "{a sample_s:.2f} s",
        "packs": "{backward_s:.2f} s",
        "gradients": "{gradients:.1f} x",
        "projected": "{projected:.1f} x",
        "off": "{off:.0e}",
        "two forwards": "{forwards_over_backward:.2f} x",
        "off, ranks": "{forwards_off:.0e}, {forwards_ranks:.4f}",
    }
    about = f"hidden {result['hidden']}, {result['layers']} layers, {result['columns']} columns"
    return columns(about, rows, cells)


if __name__ == "__main__":
    main(options(__doc__, hidden=64, layers=2, samples=32, batches=6, columns=1024), benchmark, table)
