"""What the store of keys, values and gradients refuses and holds, what autograd saves besides, and half precision.

That slices give the gradients of whole samples is in test_windows.py, that any plan of them does in sharing/.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.runtime.attention.attention import packed_attention
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attention.prefix import PrefixStore

DIM = 4
HEADS = [(2, 2), (4, 2), (4, 1)]


def tokens_of(lengths):
    return lambda index: np.zeros(lengths[index], dtype=np.int64)


A, B, C = Slice(0, 0, 8), Slice(0, 8, 14), Slice(0, 14, 20)
ALL = [("F", A), ("F", B), ("F", C)]


def kv(piece, dtype=torch.float64):
    return [torch.ones(piece.length, 2, DIM, dtype=dtype) for _ in range(2)]


def acts(store, *steps):
    """F: write; B: read and settle; of one layer."""
    for kind, piece in steps:
        if kind == "F":
            store.write(0, piece, *kv(piece))
        else:
            keys, values = store.read(0, piece)
            store.settle(0, piece, torch.ones_like(keys), torch.ones_like(values))


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([("F", B)], "a slice runs forward out of order"),
        ([("F", A), ("F", C)], "a slice runs forward out of order"),
        ([("F", A), ("F", Slice(0, 4, 14))], "a slice runs forward out of order"),
        ([("F", A), ("F", B), ("F", Slice(0, 14, 21))], "a slice is longer than its sequence"),
        ([("F", A), ("B", A)], "a slice runs backward out of order"),
        ([("F", A), ("F", B), ("B", C)], "before all slices of its sequence ran forward"),
        ([*ALL, ("B", B)], "a slice runs backward out of order"),
        ([*ALL, ("B", C), ("B", C)], "a slice runs backward out of order"),
        ([*ALL, ("B", C), ("F", C)], "a slice runs forward after its backward"),
        ([*ALL, ("B", C), ("B", B), ("B", A), ("B", A)], "a slice runs backward out of order"),
        ([*ALL, ("B", C), ("B", B), ("B", A), ("F", A)], "a slice runs forward after its backward"),
    ],
)
def test_illegal_orders_are_refused(steps, told):
    store = PrefixStore({0: 20})
    acts(store, *steps[:-1])
    with pytest.raises(EvenloadError, match=told):
        acts(store, steps[-1])


def test_what_the_store_holds_and_when():
    """K and V from the first slice to the backward of the first; their gradients as far as they are to be added to."""
    store, size = PrefixStore({0: 20}), 2 * DIM * 8

    def held():
        entries = [(e.k_LGD, e.v_LGD, e.dk_PGD, e.dv_PGD) for e in store._entries.values()]
        return sum(t.untyped_storage().nbytes() for row in entries for t in row if t is not None)

    acts(store, *ALL)
    assert held() == 2 * 20 * size
    acts(store, ("B", C))
    assert held() == 2 * (20 + C.start) * size
    acts(store, ("B", B), ("B", A))
    assert held() == 0


def test_gradients_of_half_precision_are_summed_in_float32():
    store = PrefixStore({0: 514})
    pieces = [Slice(0, a, a + 2) for a in range(0, 514, 2)]
    for piece in pieces:
        store.write(0, piece, *kv(piece, dtype=torch.bfloat16))
    for piece in reversed(pieces):
        keys, values = store.read(0, piece)
        own = store.settle(0, piece, torch.ones_like(keys), torch.ones_like(values))
        assert own[0].dtype == own[1].dtype == torch.float32
    assert (own[0] == 257).all()  # bfloat16 stops counting at 256


@pytest.mark.parametrize("frozen", [True, False])
def test_layers_wait_for_their_backward_unless_they_need_no_gradients(frozen):
    store = PrefixStore({0: 20})
    for piece in (A, B, C):
        pack = build_pack(MicroBatch((piece,), (0,)), tokens_of([20]), prefix=store)
        q, k, v = (torch.randn(piece.length, 2, DIM) for _ in range(3))
        packed_attention(q.requires_grad_(not frozen), k, v, pack, 0, 0.5)
    if not frozen:
        missing = r"backward of a slice is missing.*\n.*tokens before 20 of sequence 0 in layer 0"
        with pytest.raises(EvenloadError, match=missing):
            store.check_empty()
    store.check_empty()


def test_the_node_keeps_neither_keys_nor_values():
    """What is saved for backward: q, out and a log-sum-exp per query and head, whatever the prefix."""
    store, heads, groups = PrefixStore({0: 120, 1: 30}), 4, 2
    for slices in ([Slice(0, 0, 100)], [Slice(1, 0, 10)], [Slice(0, 100, 120), Slice(1, 10, 30)]):
        pack, saved = build_pack(MicroBatch(tuple(slices), (0,)), tokens_of([120, 30]), prefix=store), []
        q, k, v = (torch.randn(pack.num_padded_tokens, h, DIM, requires_grad=True) for h in (heads, groups, groups))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            out = packed_attention(q, k, v, pack, 0, 0.5)
        per_token = heads * (2 * DIM + 1) * q.element_size()
        assert sum(t.untyped_storage().nbytes() for t in saved) == pack.num_padded_tokens * per_token
        held = {t.untyped_storage().data_ptr() for t in saved}
        assert held >= {q.untyped_storage().data_ptr(), out.untyped_storage().data_ptr()}
        assert not held & {t.untyped_storage().data_ptr() for t in (k, v)}


GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("heads", HEADS)
def test_bfloat16_within_its_rounding(heads, device):
    """Eight slices against the same numbers in float64; a whole sequence in bfloat16 errs as much."""
    generator = torch.Generator().manual_seed(0)
    length, dim = 512, 32
    q, k, v, weight = (
        torch.randn(length, h, dim, generator=generator).bfloat16().to(device)
        for h in (heads[0], heads[1], heads[1], heads[0])
    )

    def run(slices, dtype):
        store = PrefixStore({0: length}) if slices > 1 else None
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)]
        borders = [length * i // slices for i in range(slices + 1)]
        outs = []
        for a, b in pairwise(borders):
            pack = build_pack(MicroBatch((Slice(0, a, b),), (0,)), tokens_of([length]), device, store)
            outs.append(packed_attention(*(t[a:b] for t in leaves), pack, 0, dim**-0.5))
        for out, (a, b) in reversed(list(zip(outs, pairwise(borders), strict=True))):
            out.backward(weight[a:b].to(dtype))
        if store:
            store.check_empty()
        return [torch.cat(outs).detach(), *(t.grad for t in leaves)]

    want = run(1, torch.float64)
    whole, sliced = (
        max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(run(n, torch.bfloat16), want, strict=True))
        for n in (1, 8)
    )
    assert sliced < 1e-2
    assert sliced < 2 * whole
    assert max((a - b).norm() / b.norm() for a, b in zip(run(8, torch.float64), want, strict=True)) < 1e-14
