"""What torch's allocator takes of a GPU for packs of any length, and for lengths rounded up: predicted, without one.

    python benchmarks/memory/fragmentation.py [--steps 20] [--max-tokens 16384] [--layers 8] [--hidden 4096]
                                [--ffn 14336] [--vocabulary 32000] [--alive 1] [--recompute] [--json] [--out FILE]

A Llama of these sizes in bf16 (32 heads of 128 over 8 groups) runs forward and backward on torch's meta device, by
Transformers' own code: each operator says which storages it makes and lets go of, in bytes, and none takes memory.
Attention allocates as flash attention does (output, logsumexp; three gradients, dq in float32 beside). Recorded at two
lengths, every storage is a line in the tokens of a pack, which a third length confirms; so the blocks of any pack are
known. Weights, gradients and Adam's states are one block each, as ZeRO 1 and Megatron-Core keep them.

`plugins.packing` packs 512 samples a step (lognormal lengths, median 1,024) on 8 ranks, up to --max-tokens; the blocks
of the first rank's packs go through torch's allocator (`allocator.py`).

    packs           as they come, of any length below the cap
    samples         as many samples instead, each on its own: lengths that differ by far more
    --alive         packs whose forward has run before the first one's backward, as on the first stage of a pipeline
    to 512          each padded to the next multiple of 512 tokens
    taken           the most bytes in use at once, in whole 512
    reserved        the most that the allocator holds of the device
    over            reserved / taken - 1
    late calls      of the driver (cudaMalloc, or pages mapped) a step behind the fifth step: each stops the host
    flushes         times that memory ran out and free segments went back, where the device has taken / 0.9 bytes (what
                    evenload plans for leaves a tenth free); "none" where that was not enough
    new lengths     of packs a step that no step before had, over the last half of the steps: what a compiler, a
                    captured graph or a plan of cuDNN would pay for

Left out: workspaces of cuBLAS and NCCL, and what one kernel takes and gives back.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from evenload.api import plan
from evenload.benchmarks.chains import plugins, recipe_of
from evenload.benchmarks.frame import Row, columns, main, options
from evenload.benchmarks.memory import allocator
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

META = torch.device("meta")
HEADS, GROUPS, WIDTH = 32, 8, 128
RANKS, BATCH = 8, 512
SETTLED = 5
"""Steps after which a run has seen its usual sizes."""


@dataclass(frozen=True)
class Shape:
    steps: int = 20
    max_tokens: int = 16384
    layers: int = 8
    hidden: int = 4096
    ffn: int = 14336
    vocabulary: int = 32000
    alive: int = 1
    recompute: bool = False


Event = tuple[int, int]
"""The number of a storage, and its bytes; 0 where it is let go of."""


@dataclass
class Recorder(TorchDispatchMode):
    """The storages that operators make while it is entered, in order."""

    events: list[Event] = field(default_factory=list)
    known: dict[int, tuple[weakref.ref[Any], int]] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_iter((args, kwargs or {})):
            self._note(tensor, new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            self._note(tensor, new=True)
        return out

    def _note(self, tensor: Any, *, new: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.device != META:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.known:
            number, self.count = (self.count, self.count + 1) if new else (-1, self.count)
            self.known[key] = weakref.ref(storage, lambda _: self._gone(key)), number
            if new:
                self.events.append((number, storage.nbytes()))

    def _gone(self, key: int) -> None:
        number = self.known.pop(key)[1]
        if number >= 0:
            self.events.append((number, 0))


class _Flash(torch.autograd.Function):
    """What flash attention takes of memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        sums, rows = q.new_empty(q.shape, dtype=torch.float32), torch.empty_like(lse)
        del sums, rows
        return dq, dk, dv


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _Flash.apply(q, k, v)[None], None


def build(shape: Shape) -> Any:
    """The model on the meta device, whose gradients go as soon as they are there."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register("on_meta", _attention)
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.ffn, head_dim=WIDTH,
        num_hidden_layers=shape.layers, num_attention_heads=HEADS, num_key_value_heads=GROUPS, use_cache=False,
        max_position_embeddings=1 << 20,
    )  # fmt: skip
    config._attn_implementation = "on_meta"
    with torch.device(META):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if shape.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return model.train()


def record(model: Any, tokens: int) -> tuple[list[Event], int]:
    """The events of one pack, forward and backward, and how many are the forward's."""
    recorder = Recorder()
    with recorder:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=META)
        places = torch.zeros(1, tokens, dtype=torch.int64, device=META)
        logits = model(input_ids=ids, position_ids=places, use_cache=False).logits[0]
        loss = cross_entropy(logits.float(), ids[0], reduction="sum")
        del logits
        forward = len(recorder.events)
        loss.backward()
        del loss, ids, places
    return recorder.events, forward


@dataclass(frozen=True)
class Program:
    """The events of a pack of any length: number, bytes at no token, bytes a token; (number, -1, 0) frees."""

    events: tuple[tuple[int, int, int], ...]
    forward: int
    """Events of the forward."""

    @classmethod
    def of(cls, model: Any) -> Program:
        """Raises AssertionError: a storage is no line in the tokens, or the order depends on them."""
        (short, forward), (long, _), (third, _) = (record(model, tokens) for tokens in (2048, 4096, 6144))
        events = []
        for (number, small), (other, large) in zip(short, long, strict=True):
            assert number == other
            a_token = (large - small) // 2048
            events.append((number, -1, 0) if not small else (number, small - 2048 * a_token, a_token))
        program = cls(tuple(events), forward)
        assert list(program.at(6144)) == third
        return program

    def at(self, tokens: int) -> Iterator[Event]:
        for number, fixed, a_token in self.events:
            yield number, 0 if fixed < 0 else fixed + a_token * tokens


def packs_of(shape: Shape) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the first rank's packs in every step, and of as many samples of the step."""
    heads = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "vocab_size": shape.vocabulary}
    sizes = {"num_layers": shape.layers, "hidden_size": shape.hidden, "ffn_hidden_size": shape.ffn}
    recipe = recipe_of(
        {
            "trainer": "deepspeed",
            "model": {**sizes, **heads},
            "data": {"max_length": shape.max_tokens},
            "parallel": {"dp": RANKS},
            "train": {"global_batch_size": BATCH},
            "plugins": plugins(shape.max_tokens, "packing"),
        }
    )
    draw = np.random.default_rng(0)
    packs, samples = [], []
    for _ in range(shape.steps):
        lengths = np.minimum(draw.lognormal(math.log(1024), 1.0, BATCH).astype(int) + 16, shape.max_tokens)
        planned = plan(recipe, lengths)
        packs.append([planned.micro_batches[index].num_padded_tokens for index in planned.of_rank(0)])
        samples.append(lengths[: len(packs[-1])].tolist())
    return packs, samples


def fixed_blocks(model: Any) -> list[int]:
    """Weights in bf16, gradients and master weights in float32, two moments of Adam."""
    count = sum(p.numel() for p in model.parameters())
    return [2 * count, 4 * count, 4 * count, 4 * count, 4 * count]


class Run:
    """A rank whose packs take blocks of an allocator."""

    def __init__(self, program: Program, fixed: Iterable[int], expandable: bool, capacity: float) -> None:
        self.device = allocator.Allocator(expandable, capacity)
        self._program = program
        for size in fixed:
            self.device.malloc(size)

    def steps(self, steps: list[list[int]], alive: int) -> int:
        """Run all steps; the calls of the driver behind the first ones."""
        settled = 0
        for number, packs in enumerate(steps):
            if number == SETTLED:
                settled = self.device.driver_calls
            waiting: deque[tuple[Iterator[Event], dict[int, Any]]] = deque()
            for tokens in packs:
                waiting.append((self._program.at(tokens), {}))
                self._go(*waiting[-1], self._program.forward)
                if len(waiting) == alive:
                    self._end(*waiting.popleft())
            while waiting:
                self._end(*waiting.popleft())
        return self.device.driver_calls - settled

    def _go(self, events: Iterator[Event], blocks: dict[int, Any], count: int | None = None) -> None:
        for storage, size in islice(events, count):
            if size:
                blocks[storage] = self.device.malloc(size)
            else:
                self.device.free(blocks.pop(storage))

    def _end(self, events: Iterator[Event], blocks: dict[int, Any]) -> None:
        self._go(events, blocks)
        for block in blocks.values():
            self.device.free(block)


def new_lengths(steps: list[list[int]]) -> float:
    known: set[int] = set()
    new = []
    for packs in steps:
        new.append(len(set(packs) - known))
        known |= set(packs)
    return float(np.mean(new[len(new) // 2 :]))


def benchmark(asked: Any) -> Row:
    shape = Shape(**{name: getattr(asked, name) for name in vars(Shape())})
    model = build(shape)
    program, fixed = Program.of(model), fixed_blocks(model)
    rows = []
    for (name, unpadded), to in product(zip(("packs", "samples"), packs_of(shape), strict=True), (1, 512)):
        steps = [[-(-n // to) * to for n in step] for step in unpadded]
        count = sum(map(sum, unpadded))
        common = {"lengths": name, "to": to, "tokens": (min(map(min, unpadded)), max(map(max, unpadded)))}
        common |= {"new_lengths": new_lengths(steps), "padding": sum(map(sum, steps)) / count - 1}
        for expandable in (False, True):
            whole = Run(program, fixed, expandable, float("inf"))
            late = whole.steps(steps, shape.alive) / (shape.steps - SETTLED)
            taken, reserved = whole.device.peak_taken, whole.device.peak_reserved
            row = {"expandable": expandable, "late_calls": late, "taken_bytes": taken, "reserved_bytes": reserved}
            small = Run(program, fixed, expandable, taken / 0.9)
            with suppress(allocator.NoMemoryError):
                small.steps(steps, shape.alive)
                row["flushes"] = small.device.flushes
            rows.append({**common, "flushes": None, **row})
    return {"shape": vars(shape), "torch": torch.__version__, "fixed_bytes": sum(fixed), "rows": rows}


def table(result: Row) -> Any:
    shape = result["shape"]
    cells = {
        "": lambda row: row["lengths"] + (f", to {row['to']}" if row["to"] > 1 else ""),
        "tokens": "{tokens[0]:,} to {tokens[1]:,}",
        "segments": lambda row: "expandable" if row["expandable"] else "",
        "taken": lambda row: f"{row['taken_bytes'] / 2**30:.1f} GiB",
        "reserved": lambda row: f"{row['reserved_bytes'] / 2**30:.1f} GiB",
        "over": lambda row: f"{row['reserved_bytes'] / row['taken_bytes'] - 1:.1%}",
        "late calls": "{late_calls:.1f}",
        "flushes": lambda row: "none" if row["flushes"] is None else str(row["flushes"]),
        "new lengths": "{new_lengths:.1f}",
        "padding": "{padding:.1%}",
    }
    title = f"predicted: packs up to {shape['max_tokens']:,} tokens, {shape['layers']} layers of {shape['hidden']}"
    title += f", {shape['alive']} packs alive" if shape["alive"] > 1 else ""
    title += ", recomputed" if shape["recompute"] else ""
    return columns(title, result["rows"], cells, f"torch {result['torch']}, no GPU")


if __name__ == "__main__":
    main(options(__doc__, **vars(Shape())), benchmark, table)
