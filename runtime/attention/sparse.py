"""Attention that leaves blocks of keys out, in passes without gradients: a choice for each sequence, or slice of one,
that one rank has for itself.

Shape legend: that of `choosers`; N = queries.

Each query block attends to the keys from its own begin on, causally, and to the kept blocks before it; the two are
merged by their log-sum-exp. The kept blocks of a key/value head are gathered once for all query heads that share it. On
CUDA, FlexAttention reads them where they lie.

With r the share of the softmax that a query's kept keys have, its output is off by (1 - r)(o_kept - o_left_out), so by
no more than 2 (1 - r) max ||v||. A pass says which share of the pairs it kept; what its losses are off by, a share of
the samples that is scored densely as well has to show.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...core.aliases import Floats
from ...core.plan.step_plan import Slice, StepPlan
from ..world.agreement import everyone
from .blocks import Inputs, choose_block, merge
from .choosers import GRID, BlockChoice, Chooser, Grid, in_blocks
from .kernels import KernelRow, first_of, has
from .prefix import PrefixStore
from .scores import ScoreForm

log = logging.getLogger("evenload")

SHARED, ALIKE = "of samples that ranks share", "of samples that begin alike"
SEARCH_EVERY = 20
"""Passes of a sample from one search for its blocks to the next (AdaSpa searches at steps 10 and 30 of 50)."""


BlocksKey = tuple[str, int, int]
"""What names a sample, the layer, and where the slice begins."""


class KeptBlocks:
    """Blocks of samples that one pass has chosen for later ones, a bit a block, on this rank.

    Those that come first are kept: `has_room` says whether more may be written under ``cap_bytes``.
    """

    def __init__(self, cap_bytes: int | None = None, search_every: int = SEARCH_EVERY) -> None:
        self.cap_bytes, self.search_every = cap_bytes, search_every
        self.num_bytes = 0
        self._rows: dict[BlocksKey, tuple[npt.NDArray[np.uint8], torch.Size, int]] = {}

    def read(self, key: BlocksKey, like: Tensor) -> Tensor | None:
        """What was written, if it has this shape; None: it is time to search."""
        bits, shape, uses = self._rows.get(key, (None, None, 0))
        if bits is None or shape != like.shape or uses + 1 >= self.search_every:
            return None
        self._rows[key] = bits, like.shape, uses + 1
        return torch.from_numpy(np.unpackbits(bits, count=like.numel()).astype(bool)).view(like.shape)

    def has_room(self, key: BlocksKey, like: Tensor) -> bool:
        """Whether a choice of this shape may be written."""
        return self.cap_bytes is None or self.num_bytes + self._more_bytes(key, like) <= self.cap_bytes

    def write(self, key: BlocksKey, chosen: Tensor) -> None:
        """Keep a choice for `search_every` - 1 passes."""
        self.num_bytes += self._more_bytes(key, chosen)
        self._rows[key] = np.packbits(chosen.numpy()), chosen.shape, 0

    def _more_bytes(self, key: BlocksKey, like: Tensor) -> int:
        return -(-like.numel() // 8) - (self._rows[key][0].nbytes if key in self._rows else 0)


class KeptPairs(NamedTuple):
    """What a pass left of the pairs of query and key of each sequence, over layers and heads, float64 [N]; 1 of those
    that were dense."""

    kept: Floats
    """The share in the blocks that were chosen: what a later pass costs."""
    computed: Floats
    """The share that this pass computed; a dense pass that searches computes all."""


@dataclass(eq=False)
class SparsePass:
    """What one pass without gradients leaves blocks of keys out by; it goes with each pack (`Pack.sparse`)."""

    chooser: Chooser
    mass: float
    """The share of the softmax that kept blocks shall have, below 1: with all of it, a pass is dense and has no need of
    this."""
    samples: Sequence[str | None]
    """By sequence of the plan: what names its sample, over passes; None: it is dense."""
    blocks: KeptBlocks = field(default_factory=KeptBlocks)
    """Of earlier passes."""
    grid: Grid = GRID

    def __post_init__(self) -> None:
        self._pairs_3N = np.zeros((3, len(self.samples)))

    def begin(self, plan: StepPlan) -> None:
        """What ranks share of a plan is dense, in all its slices."""
        shared = {piece.sequence for m in plan.micro_batches if len(m.ranks) > 1 for piece in m.slices}
        self.samples = [None if i in shared else name for i, name in enumerate(self.samples)]
        if shared:
            say_dense(SHARED)

    def segment(self, piece: Slice | None, store: PrefixStore | None) -> SparseSegment | None:
        """How a slice is attended to that this rank has for itself; None: densely."""
        if piece is None or self.samples[piece.sequence] is None:
            return None
        return SparseSegment(self, piece, store if store and piece.sequence in store else None)

    def note(self, sequence: int, pairs: tuple[float, float, float]) -> None:
        """Count pairs of a sequence: kept, computed, all."""
        self._pairs_3N[:, sequence] += pairs

    def pairs(self) -> KeptPairs:
        """Over all ranks, the same on each. Collective."""
        kept, computed, whole = np.sum(everyone(self._pairs_3N), axis=0)
        whole, none = np.maximum(whole, 1), whole == 0
        return KeptPairs(np.where(none, 1.0, kept / whole), np.where(none, 1.0, computed / whole))


class SparseSegment(NamedTuple):
    """A slice that leaves blocks out, or a whole sequence."""

    of: SparsePass
    piece: Slice
    store: PrefixStore | None
    """Of the keys and values before it; None: it is whole."""


class SparseCall(NamedTuple):
    """One choice to be carried out."""

    choice: BlockChoice
    v_MGD: Tensor
    chosen_GIJ: Tensor


@dataclass(frozen=True)
class SparseKernel(KernelRow):
    """One row of `SPARSE`, which carries out a choice."""

    run: Callable[[SparseCall], Tensor]
    """Gives out_NHD."""


def sparse_attention(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    segment: SparseSegment,
    layer: int,
    scores: ScoreForm,
    dense: Callable[[], Tensor],
) -> Tensor:
    """Attention of a slice with what `segment` says; ``dense`` gives it with all keys. Under no_grad."""
    assert not torch.is_grad_enabled(), "only passes without gradients leave blocks out"
    run, piece, store = segment
    sample = run.samples[piece.sequence]
    assert sample is not None
    if scores.options:
        say_dense(f"of layers with {' and '.join(sorted(scores.options))}")
        return dense()
    k_MGD, v_MGD = store.write(layer, piece, k_NGD, v_NGD) if store else (k_NGD, v_NGD)
    choice = BlockChoice(q_NHD, k_MGD, scores.scale, run.mass, run.grid)
    key, like = (sample, layer, piece.start), choice.empty()
    if not like.numel():
        pairs, _ = num_pairs(choice, like)
        run.note(piece.sequence, (pairs, pairs, pairs))
        return dense()
    chosen = run.blocks.read(key, like) if run.chooser.keeps else run.chooser.choose(choice)
    if chosen is None and not run.blocks.has_room(key, like):
        say_dense(f"of samples beyond the {run.blocks.cap_bytes} bytes that blocks may take")
        return dense()
    out_NHD = None
    if chosen is None:
        chosen, out_NHD = run.chooser.choose(choice), dense()
        run.blocks.write(key, chosen)
    kept, whole = num_pairs(choice, chosen)
    run.note(piece.sequence, (kept, kept if out_NHD is None else whole, whole))
    if out_NHD is None:
        row = choose_sparse(q_NHD.device, q_NHD.dtype, q_NHD.shape[-1])
        out_NHD = row.run(SparseCall(choice, v_MGD, chosen))
    return out_NHD


def num_pairs(choice: BlockChoice, chosen_GIJ: Tensor) -> tuple[float, float]:
    """Pairs of query and key that a choice leaves, and all that a causal mask leaves, of one head in each group."""
    kept, whole, groups = 0.0, 0.0, len(chosen_GIJ)
    for block, blocks in zip(choice.query_blocks, chosen_GIJ.sum((0, 2)).tolist(), strict=True):
        rows = block.end - block.first
        own = rows * (block.visible(range(block.first, block.end))[0] + (rows - 1) / 2)
        kept += groups * own + rows * choice.grid.keys * blocks
        whole += groups * (own + rows * block.begin)
    return kept, whole


def _gather(call: SparseCall) -> Tensor:
    (q_NHD, k_MGD, scale, _, grid), v_MGD, chosen_GIJ = call
    forward = choose_block(q_NHD.device, q_NHD.dtype, q_NHD.shape[-1]).forward
    whole = len(k_MGD) // grid.keys * grid.keys
    blocks = [in_blocks(x[:whole].transpose(0, 1), grid.keys).contiguous() for x in (k_MGD, v_MGD)]
    out_NHD = torch.empty_like(q_NHD)
    for number, block in enumerate(call.choice.query_blocks):
        rows, own = slice(block.first, block.end), slice(block.begin, block.stop)
        done = forward(Inputs(q_NHD[rows], k_MGD[own], v_MGD[own], True, scale))
        if block.begin:
            parts = []
            for group, q_NRD in enumerate(q_NHD[rows].chunk(len(chosen_GIJ), 1)):
                places = chosen_GIJ[group, number].nonzero()[:, 0].to(q_NHD.device)
                k_M1D, v_M1D = (x[group].index_select(0, places).flatten(0, 1)[:, None] for x in blocks)
                parts.append(forward(Inputs(q_NRD, k_M1D, v_M1D, False, scale)))
            outs, lses = zip(*parts, strict=True)
            done = merge(*done, torch.cat(outs, 1), torch.cat(lses))
        out_NHD[rows] = done[0]
    return out_NHD


def _flex(call: SparseCall) -> Tensor:
    """Queries before a slice that begins inside a block are filled up with zeros."""
    from torch.nn.attention.flex_attention import BlockMask

    (q_NHD, k_MGD, scale, _, grid), v_MGD, chosen_GIJ = call
    first, groups = next(iter(call.choice.query_blocks)), len(chosen_GIJ)
    filled = len(k_MGD) - len(q_NHD) - first.begin
    own_IJ = torch.zeros(chosen_GIJ.shape[1], -(-len(k_MGD) // grid.keys), dtype=torch.bool)
    whole_GIJ = own_IJ.expand(groups, -1, -1).clone()
    whole_GIJ[..., : chosen_GIJ.shape[2]] = chosen_GIJ
    for number, block in enumerate(call.choice.query_blocks):
        own_IJ[number, block.begin // grid.keys : -(-block.stop // grid.keys)] = True

    own_HIJ, whole_HIJ = (
        x.to(q_NHD.device).repeat_interleave(q_NHD.shape[1] // groups, 0)
        for x in (own_IJ.expand(groups, -1, -1), whole_GIJ)
    )
    seen_HIJ = own_HIJ | whole_HIJ

    def seen(_: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen_HIJ[head, query // grid.queries, key // grid.keys] & (key <= query + first.begin)

    mask = BlockMask.from_kv_blocks(
        *_indices(own_HIJ),
        *_indices(whole_HIJ),
        BLOCK_SIZE=(grid.queries, grid.keys),
        mask_mod=seen,
        seq_lengths=(len(q_NHD) + filled, len(k_MGD)),
    )
    q_1HND, k_1GMD, v_1GMD = (x.transpose(0, 1)[None] for x in (q_NHD, k_MGD, v_MGD))
    q_1HND = torch.nn.functional.pad(q_1HND, (0, 0, filled, 0))
    tiles = {"BLOCK_M": grid.keys, "BLOCK_N": grid.keys}  # a tile may not reach over blocks
    more: dict[str, Any] = {"scale": scale, "enable_gqa": True, "kernel_options": tiles}
    out: Tensor = _flex_attention(q_NHD.is_cuda)(q_1HND, k_1GMD, v_1GMD, block_mask=mask, **more)
    return out[0, :, filled:].transpose(0, 1)


@cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention


def _indices(kept_HIJ: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row keeps, and their places, first."""
    kept_1HIJ = kept_HIJ.to(torch.int32)[None]
    order_1HIJ = kept_1HIJ.argsort(dim=-1, stable=True, descending=True)
    return kept_1HIJ.sum(-1, dtype=torch.int32), order_1HIJ.to(torch.int32)


def _on_cuda(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    return device.type == "cuda" and head_dim >= 16 and dtype != torch.float64


SPARSE = (
    SparseKernel("flex", lambda: has("torch.nn.attention.flex_attention", "BlockMask"), _on_cuda, _flex),
    SparseKernel("gather", lambda: True, lambda *_: True, _gather),
)


@cache
def choose_sparse(device: torch.device, dtype: torch.dtype, head_dim: int) -> SparseKernel:
    """The first row of `SPARSE` that is there and takes these inputs; chosen, and logged, once for each."""
    return first_of(SPARSE, device, dtype, head_dim, "sparse attention")


@cache
def say_dense(what: str) -> None:
    """Say, once, what a sparse pass computes densely."""
    log.info("sparse scoring: the attention %s is dense", what)
