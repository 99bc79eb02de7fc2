"""Slices against whole sequences: a small float64 model, its loss and gradients, over random cuts, packs and orders."""

from functools import partial
from itertools import pairwise, zip_longest

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.runtime.attention import blocks
from evenload.runtime.attention.attention import packed_attention
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attention.prefix import PrefixStore
from harness.attention import attention
from harness.proof.faults import around, fault
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

DIM, WIDTH, VOCABULARY, LAYERS = 4, 12, 50, 3
HEADS = [(2, 2), (4, 2), (4, 1)]


class Model:
    """Embedding, positions, attention layers with a residual, and a loss with a weight of its own for each token."""

    def __init__(self, heads, groups):
        generator = torch.Generator().manual_seed(heads + groups)

        def weight(rows, columns=WIDTH):
            return torch.randn(rows, columns, generator=generator, dtype=torch.float64).requires_grad_()

        self.parameters = {"embedding": weight(VOCABULARY)}
        for layer in range(LAYERS):
            for name, rows in (("q", heads), ("k", groups), ("v", groups), ("o", heads)):
                self.parameters[f"{name}{layer}"] = weight(WIDTH, rows * DIM)

    def run(self, tokens_T, positions_T, attend, wrap=None):
        """Sum of the tokens' losses; a third of the tokens weighs nothing, padding (token 0) among them."""
        angles = positions_T[:, None] / 3.0 + torch.arange(WIDTH, dtype=torch.float64)
        x = self.parameters["embedding"][tokens_T] + angles.sin()
        for layer in range(LAYERS):
            x = wrap(self.layer, x, layer, attend) if wrap else self.layer(x, layer, attend)
        weights = (tokens_T % 3) * (1 + positions_T / 10)
        return (x.tanh().sum(-1) * weights).sum()

    def layer(self, x, layer, attend):
        *into, out = (self.parameters[f"{name}{layer}"] / WIDTH**0.5 for name in "qkvo")
        q, k, v = ((x @ weight).unflatten(1, (-1, DIM)) for weight in into)
        return x + attend(q, k, v, layer).flatten(1).tanh() @ out.T

    def take_gradients(self):
        taken = {name: p.grad for name, p in self.parameters.items()}
        for p in self.parameters.values():
            p.grad = None
        return taken


def tokens_of(lengths):
    return lambda index: np.random.default_rng(index).integers(0, VOCABULARY, lengths[index])


def plain(model, lengths):
    """Loss and gradients of whole sequences, one by one."""
    total = 0.0
    for index, length in enumerate(lengths):
        tokens = torch.from_numpy(tokens_of(lengths)(index))
        loss = model.run(tokens, torch.arange(length), lambda q, k, v, _: attention(q, k, v, DIM**-0.5)[0])
        loss.backward()
        total += loss.item()
    return total, model.take_gradients()


def attend(pack):
    return lambda q, k, v, layer: packed_attention(q, k, v, pack, layer, DIM**-0.5)


WRAPS = {
    "plain": None,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
}


def execute(model, plan, wrap=None, **layout):
    """Run a plan's only stage in its order: loss and gradients. Leaves nothing in the store."""
    lengths = plan.lengths.tolist()
    store = PrefixStore.of_plan(plan)

    def pack_of(micro_batch):
        return build_pack(micro_batch, tokens_of(lengths), prefix=store, **layout)

    def run(pack):
        return model.run(pack.tokens_T, pack.positions_T, attend(pack), wrap)

    total, losses = 0.0, {}
    for kind, index in plan.order[0]:
        if kind == "F" and index in plan.kept:
            losses[index] = run(pack_of(plan.micro_batches[index]))
            total += losses[index].item()
        elif kind == "F":
            with torch.no_grad():
                run(pack_of(plan.micro_batches[index]))
        else:
            stored_forward = plan.forward_of[index]
            loss = losses.pop(stored_forward) if stored_forward is not None else run(pack_of(plan.passes("B")[index]))
            total += loss.item() if stored_forward is None else 0.0
            loss.backward()
    if store is not None:
        store.check_empty()
    return total, model.take_gradients()


def error(found, wanted):
    """Largest relative error; where a gradient vanishes but for rounding, as that of a softmax over one key does, it is
    measured against the largest one."""
    least = 1e-3 * max(g.norm().item() for g in wanted[1].values())
    errors = [(found[1][name] - g).norm().item() / max(g.norm().item(), least) for name, g in wanted[1].items()]
    return max(*errors, abs(found[0] - wanted[0]) / abs(wanted[0]))


def pieces_of(lengths, cuts):
    """For each sequence its slices, ascending."""
    return [
        [Slice(i, a, b) for a, b in pairwise(sorted({0, n, *(c % n for c in cut)}))]
        for i, (n, cut) in enumerate(zip(lengths, cuts, strict=True))
    ]


def grouped(draw, chains):
    """Micro-batches that take the chains from their heads, some heads at a time."""
    waiting = [list(chain) for chain in chains]
    micro_batches = []
    while any(waiting):
        ready = [i for i, chain in enumerate(waiting) if chain]
        chosen = draw(st.lists(st.sampled_from(ready), min_size=1, max_size=3, unique=True))
        micro_batches.append(MicroBatch(tuple(waiting[i].pop(0) for i in chosen), (0,)))
    return tuple(micro_batches)


@st.composite
def plans(draw):
    """A lawful plan of one rank: any cuts, packs and order; symmetric or not, some or all of it replayed."""
    lengths = draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    cuts = st.lists(st.lists(st.integers(0, 100), max_size=4), min_size=len(lengths), max_size=len(lengths))
    forward = grouped(draw, pieces_of(lengths, draw(cuts)))
    if draw(st.booleans()):
        chains = pieces_of(lengths, draw(cuts))
        backward = grouped(draw, [chain[::-1] for chain in chains])
        replayed = tuple(range(len(backward)))
        order = [*(Op("F", i) for i in range(len(forward))), *(Op("B", j) for j in range(len(backward)))]
    else:
        backward = ()
        replayed = tuple(sorted(draw(st.sets(st.sampled_from(range(len(forward)))))))
        order = legal_order(draw, forward)
    limits = Limits(num_ranks=1, max_tokens=1000)
    return check(StepPlan(as_lengths(lengths), forward, limits, (tuple(order),), backward=backward, replayed=replayed))


def legal_order(draw, forward):
    """Any order of F and B in which slices ascend forward, then descend backward."""
    chains = {}
    for index, micro_batch in enumerate(forward):
        for piece in micro_batch.slices:
            chains.setdefault(piece.sequence, []).append(index)
    before = {Op(kind, i): set() for kind in "FB" for i in range(len(forward))}
    for chain in chains.values():
        for a, b in pairwise(chain):
            before[Op("F", b)].add(Op("F", a))
            before[Op("B", a)].add(Op("B", b))
        before[Op("B", chain[-1])].add(Op("F", chain[-1]))
    for index in range(len(forward)):
        before[Op("B", index)].add(Op("F", index))
    order = []
    while before:
        ready = sorted(op for op, needs in before.items() if needs <= set(order))
        order.append(draw(st.sampled_from(ready)))
        del before[order[-1]]
    return order


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a checkpoint under no_grad
@given(plans(), st.sampled_from(HEADS), st.sampled_from(sorted(WRAPS)), st.integers(1, 4))
def test_any_plan_gives_the_gradients_of_whole_sequences(plan, heads, wrap, multiple):
    model = Model(*heads)
    wanted = plain(model, plan.lengths.tolist())
    assume(wanted[0] != 0)  # else every token of the batch weighs nothing
    found = execute(model, plan, WRAPS[wrap], segment_multiple=multiple)
    assert error(found, wanted) < 1e-11


LENGTHS = [40, 9, 30]


def chain(replayed=()):
    """Two cut sequences, their k-th slices in one micro-batch; the one that is whole lies next to the first."""
    waiting = pieces_of(LENGTHS, [[5, 16, 17, 31], [], [11, 20]])
    micro_batches = [MicroBatch(tuple(one for one in row if one), (0,)) for row in zip_longest(*waiting)]
    count = len(micro_batches)
    order = [*(Op("F", i) for i in range(count)), *(Op("B", i) for i in reversed(range(count)))]
    limits = Limits(num_ranks=1, max_tokens=10_000)
    return check(StepPlan(as_lengths(LENGTHS), tuple(micro_batches), limits, (tuple(order),), replayed=tuple(replayed)))


SLICED, REPLAYED = chain(), chain(range(5))


def shorter_prefix(write, store, layer, piece, k, v, **more):
    """The oldest token is not seen; its place takes the one behind it."""
    keys, values = write(store, layer, piece, k, v, **more)
    return (torch.cat([t[1:2], t[1:]]) if piece.start else t for t in (keys, values))


MUTANTS = {
    "dropped accumulator": fault("dropped accumulator"),
    "shorter prefix": lambda: around(PrefixStore, "write", shorter_prefix),
    "unscaled merge": lambda: around(blocks, "merge", lambda merge, *of: (of[0] + of[2], merge(*of)[1])),
    # The backward of a slice takes the log-sum-exp of its own tokens only.
    "own log-sum-exp": lambda: around(blocks, "merge", lambda merge, *of: (merge(*of)[0], of[3])),
}


@pytest.mark.parametrize("plan", [SLICED, REPLAYED], ids=["kept", "replayed"])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(plan, name):
    model = Model(4, 2)
    wanted = plain(model, LENGTHS)
    assert error(execute(model, plan), wanted) < 1e-12
    with MUTANTS[name]():
        assert error(execute(model, plan), wanted) > 1e-4


A, B, C = Slice(0, 0, 8), Slice(0, 8, 14), Slice(0, 14, 20)
ALL = [("F", A), ("F", B), ("F", C)]


def kv(piece, value=1.0, dtype=torch.float64):
    return [torch.full((piece.length, 2, DIM), value, dtype=dtype) for _ in range(2)]


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
        attend(pack)(q.requires_grad_(not frozen), k, v, 0)
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
            out = attend(pack)(q, k, v, 0)
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
