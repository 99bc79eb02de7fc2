"""Rows of gradients by sample, of packs with slices and with padding, against autograd on each sample alone."""

import numpy as np
import pytest
import torch
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.runtime.adapters.by_sample import SampleGradients
from evenload.runtime.adapters.peers import AdapterPeers
from evenload.runtime.adapters.places import AdaptedBlock, AdapterState, Place, Site
from evenload.runtime.adapters.projection import projection
from evenload.runtime.adapters.tenant import TenantAdapter
from evenload.runtime.attention.pack import build_pack
from torch import nn

CPU, LENGTHS = torch.device("cpu"), (5, 3, 7, 2)
NAMES = ("layers.0.up", "layers.0.down")
ADAPTER = Adapter(r=2, lora_alpha=6, rank_pattern={"down": 3})
PACKS = (
    ((0, 0, 5), (1, 0, 3), (2, 0, 7), (3, 0, 2)),
    ((2, 0, 3), (0, 0, 5)),
    ((1, 0, 3), (2, 3, 6)),
    ((2, 6, 7), (3, 0, 2)),
)
"""The first alone, or the three others: slices of sequence 2 beside others."""


class Layer(nn.Module):
    """A layer without attention: a token's output depends on that token alone, so slices can be cut anywhere."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 4, dtype=torch.float64)
        self.requires_grad_(False)

    def forward(self, x_TC, *, pack=None):
        return x_TC + self.down(self.up(x_TC).tanh())


@pytest.fixture
def layer():
    torch.manual_seed(1)
    return Layer()


def rows_of(layer):
    sites = []
    for name, module in zip(NAMES, (layer.up, layer.down), strict=True):
        outputs, inputs = module.weight.shape
        sites.append(Site(module, (Place(name, outputs, inputs, (0, outputs), (0, inputs)),)))
    block = AdaptedBlock(layer, lambda _, words: words["pack"], tuple(sites))
    return SampleGradients([block], NAMES, AdapterPeers(), torch.float64, CPU)


def state():
    shapes = {"up.lora_A": (2, 4), "up.lora_B": (6, 2), "down.lora_A": (3, 6), "down.lora_B": (4, 3)}
    draw = torch.Generator().manual_seed(3)
    weights, first = (
        {f"layers.0.{n}": torch.randn(s, generator=draw, dtype=torch.float64) for n, s in shapes.items()} for _ in "WM"
    )
    return AdapterState(weights, first, {n: m.square() for n, m in first.items()}, 4)


def inputs():
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(n, 4, generator=draw, dtype=torch.float64) for n in LENGTHS]


def alone(layer, weights):
    """Gradients of the sum of squares of each sample's outputs, from a forward of it alone."""
    rows = []
    for x in inputs():
        own = {name: w.clone().requires_grad_() for name, w in weights.items()}
        hidden = x
        for part, module in zip(("up", "down"), (layer.up, layer.down), strict=True):
            a, b = own[f"layers.0.{part}.lora_A"], own[f"layers.0.{part}.lora_B"]
            hidden = module(hidden) + ADAPTER.scaling_of(f"layers.0.{part}") * hidden @ a.T @ b.T
            hidden = hidden.tanh() if part == "up" else x + hidden
        hidden.square().sum().backward()
        rows.append({name: w.grad for name, w in own.items()})
    return rows


def plan_of(packs):
    micro_batches = tuple(MicroBatch(tuple(Slice(*piece) for piece in pack), (0,)) for pack in packs)
    return StepPlan(as_lengths(LENGTHS), micro_batches, Limits(1, 64))


def run(layer, rows, plan, multiple=1):
    rows.begin_rows(plan, 0)
    whole = inputs()
    for micro_batch in plan.micro_batches:
        pack = build_pack(micro_batch, lambda i: np.zeros(LENGTHS[i], dtype=np.int64), pack_multiple=multiple)
        x = torch.zeros(pack.num_padded_tokens, 4, dtype=torch.float64)
        real = torch.zeros(pack.num_padded_tokens, 1, dtype=torch.float64)
        for piece, first in zip(pack.slices, pack.segments, strict=False):
            x[first : first + piece.length] = whole[piece.sequence][piece.start : piece.stop]
            real[first : first + piece.length] = 1
        (layer(x, pack=pack).square() * real).sum().backward()


def flat(one):
    return torch.cat([one[f"layers.0.{part}.lora_{kind}"].flatten() for part in ("up", "down") for kind in "AB"])


@pytest.mark.parametrize("packs", [PACKS[:1], PACKS[1:]], ids=["whole", "slices"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_every_sequence_of_a_pack_has_its_own_gradient(layer, packs, multiple):
    rows, start = rows_of(layer), state()
    rows.take(ADAPTER, TenantTrain(), start)
    plan, expected = plan_of(packs), alone(layer, dict(start.weights))
    run(layer, rows, plan, multiple)
    assert layer.up.weight.grad is None
    wanted = torch.stack([flat(one) for one in expected])
    projected = [
        sum(projection(n, g.flatten(), torch.arange(g.numel()), 70, 9) for n, g in one.items()) for one in expected
    ]
    torch.testing.assert_close(rows.projected(70, 9), torch.stack(projected), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(rows.norms_of_rows(), wanted.norm(dim=1), rtol=1e-12, atol=0)
    direction = rows.mean_direction(rows.norms_of_rows(), len(LENGTHS))
    torch.testing.assert_close(direction, (wanted / wanted.norm(dim=1, keepdim=True)).mean(0), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(rows.products(direction), wanted @ direction, rtol=1e-11, atol=0)
    assert rows.norm_of(direction) == pytest.approx(float(direction.norm()), rel=1e-12)
    rows.divide(torch.tensor([5.0, 0.0, 7.0, 2.0]))
    divisors = torch.tensor([5.0, 1.0, 7.0, 2.0])
    torch.testing.assert_close(rows.norms_of_rows(), wanted.norm(dim=1) / divisors, rtol=1e-12, atol=0)
    rows.end_rows()
    rows.close()


def test_adam_turns_whole_rows(layer):
    rows, start, train = rows_of(layer), state(), TenantTrain(betas=(0.8, 0.9), eps=1e-3)
    rows.take(ADAPTER, train, start)
    expected = torch.stack([flat(one) for one in alone(layer, dict(start.weights))])  # before spans are known to hooks
    run(layer, rows, plan_of(PACKS[1:]))
    rows.gather()
    rows.precondition()
    mean = 0.8 * flat(dict(start.first)) + 0.2 * expected
    turned = mean / ((0.9 * flat(dict(start.second)) + 0.1 * expected**2).sqrt() + 1e-3)
    torch.testing.assert_close(rows.norms_of_rows(), turned.norm(dim=1), rtol=1e-11, atol=0)


def test_a_mean_direction_is_over_all_samples_whatever_a_rank_has_of_them(layer):
    """Rank 0 has three of four; the fourth counts all the same, and one without a gradient adds nothing."""
    rows, start = rows_of(layer), state()
    rows.take(ADAPTER, TenantTrain(), start)
    own = MicroBatch(tuple(Slice(*piece) for piece in PACKS[0][:3]), (0,))
    other = MicroBatch((Slice(*PACKS[0][3]),), (1,))
    plan = StepPlan(as_lengths(LENGTHS), (own, other), Limits(2, 64))
    rows.begin_rows(plan, 0)
    gradients = torch.randn(3, rows._own.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rows._own.gradients.copy_(gradients)
    norms_N = torch.tensor([*gradients.norm(dim=1).tolist(), 7.0], dtype=torch.float64)
    wanted = sum(one / one.norm() for one in gradients) / 4
    torch.testing.assert_close(rows.mean_direction(norms_N, 4), wanted, rtol=1e-13, atol=0)
    norms_N[1] = 0.0
    wanted = (gradients[0] / gradients[0].norm() + gradients[2] / gradients[2].norm()) / 4
    torch.testing.assert_close(rows.mean_direction(norms_N, 4), wanted, rtol=1e-13, atol=0)
    rows.end_rows()
    rows.close()


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_of_matrices_that_tensor_parallel_ranks_hold_alike_one_of_them_counts(kind):
    """A layer divided by its inputs has its own part of A and all of B; one divided by its outputs the reverse."""
    module = nn.Linear(4, 6, dtype=torch.float64)
    parts = {"columns": (0, 2) if kind == "columns" else (0, 4), "rows": (0, 6) if kind == "columns" else (0, 3)}
    place = Place("up", 6, 4, parts["rows"], parts["columns"])
    adapter = TenantAdapter(
        Adapter(r=2), TenantTrain(), [Site(module, (place,))], owner=0, owners=1, dtype=torch.float64, device=CPU
    )
    for matrix, value in zip(adapter.matrices, (3.0, 5.0), strict=True):
        matrix.gradient.fill_(value)
    a, b = (9.0 * 2 * 2, 25.0 * 6 * 2) if kind == "columns" else (9.0 * 2 * 4, 25.0 * 3 * 2)
    assert float(adapter.squares(counts=True)) == a + b
    assert float(adapter.squares(counts=False)) == (a if kind == "columns" else b)
