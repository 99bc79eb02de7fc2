"""Adapters of many tenants on a linear layer: as evenload computes them, against the bare product and other ways.

    python benchmarks/gpu/adapters.py [--json] [--hidden 4096] [--tokens 16384] [--tenants 1,8,64] [--rank 16] \\
        [--dtype bf16] [--tiny]

A frozen layer [hidden, hidden] with an adapter of so many tenants, whose tokens lie side by side; forward, and backward
down to the layer's input and to the adapters' matrices. bfloat16 activations (or float32), adapters in float32.

    bare       the layer alone, with the gradient of its input
    evenload   `runtime.adapters.product`: one autograd function, tenant by tenant, gradients straight into the buffers
    loop       as a textbook has it: two products a tenant, put together by autograd
    grouped    all tenants at once by torch's grouped product, which takes bfloat16, tenants of equal rank, and tokens
               of each by sixteens

Errors are relative, against the same in float64, the largest of output, gradient of the input, and gradients of all
matrices: bf16 parity is evenload's next to the loop's. Times are medians of runs after two to warm up, by CUDA events
(wall time on the CPU). ``--tiny`` tries all of it out without a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from evenload.benchmarks.frame import Row, columns, options, show
from evenload.benchmarks.gpu.card import about, asked_for, device_here, milliseconds, relative
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.runtime.adapters.places import Place, Site
from evenload.runtime.adapters.product import TenantSpan, added
from evenload.runtime.adapters.tenant import TenantAdapter
from torch import Tensor

ALPHA = 32.0
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ALIGNED = 16
"""Tokens of a tenant are a multiple of it."""


class Case(NamedTuple):
    """Shape legend: T = tokens of all tenants, C = hidden, r = rank, N = tenants."""

    weight_CC: Tensor
    x_TC: Tensor
    dy_TC: Tensor
    a_NrC: Tensor
    b_NCr: Tensor
    """Of adapters, float32; grouped and loop train these, evenload has them in its own buffers."""
    sizes: list[int]
    """Tokens of each tenant."""

    @property
    def scaling(self) -> float:
        return ALPHA / self.a_NrC.shape[1]


Passes = tuple[Tensor, ...]
"""What a forward and a backward give: outputs, gradients of the input, and of all A and B."""


class Variant(NamedTuple):
    """One way to compute."""

    run: Callable[[], Any]
    """A forward and a backward, which is what is timed."""
    passes: Callable[[], Passes]
    """The same, with what it gives."""


def case_of(asked: argparse.Namespace, tenants: int, device: torch.device) -> Case:
    """Tenants of unlike sizes: shares of 1, 2, 3, 1, 2, 3 ..."""
    hidden, rank, dtype = asked.hidden, asked.rank, DTYPES[asked.dtype]
    draw = torch.Generator().manual_seed(tenants)
    shares = [1 + tenant % 3 for tenant in range(tenants)]
    each = max(1, asked.tokens // (sum(shares) * ALIGNED)) * ALIGNED
    sizes = [each * share for share in shares]

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw) * scale).to(device)

    return Case(
        drawn(hidden, hidden, scale=hidden**-0.5).to(dtype),
        drawn(sum(sizes), hidden).to(dtype),
        drawn(sum(sizes), hidden).to(dtype),
        drawn(tenants, rank, hidden, scale=hidden**-0.5),
        drawn(tenants, hidden, rank, scale=0.1),
        sizes,
    )


def base_alone(case: Case) -> Variant:
    x_TC = case.x_TC.clone().requires_grad_()

    def run() -> None:
        x_TC.grad = None
        (x_TC @ case.weight_CC.t()).backward(case.dy_TC)

    return Variant(run, lambda: ())


def evenload(case: Case) -> Variant:
    (_, rank, hidden), linear = case.a_NrC.shape, torch.nn.Linear(1, 1)
    site = Site(linear, (Place("layer", hidden, hidden, (0, hidden), (0, hidden)),))
    adapter = Adapter(r=rank, lora_alpha=ALPHA)
    tenants = []
    for a_rC, b_Cr in zip(case.a_NrC, case.b_NCr, strict=True):
        where: dict[str, Any] = {"dtype": torch.float32, "device": a_rC.device}
        tenant = TenantAdapter(adapter, TenantTrain(), [site], owner=0, owners=1, **where)
        for matrix, value in zip(tenant.matrices, (a_rC, b_Cr), strict=True):
            matrix.value.copy_(value)
        tenants.append(tenant)
    spans = [TenantSpan(size, tenant) for size, tenant in zip(case.sizes, tenants, strict=True)]
    x_TC = case.x_TC.clone().requires_grad_()

    def run() -> Tensor:
        x_TC.grad = None
        y_TC = added(x_TC @ case.weight_CC.t(), x_TC, site, spans, None)
        y_TC.backward(case.dy_TC)
        return y_TC.detach()

    def passes() -> Passes:
        for tenant in tenants:
            tenant.gradients.zero_()
        y_TC = run()
        assert x_TC.grad is not None
        gradients = (torch.stack([tenant.matrices[i].gradient for tenant in tenants]) for i in range(2))
        return y_TC, x_TC.grad, *gradients

    return Variant(run, passes)


def loop(case: Case) -> Variant:
    leaves = [tensor.clone().requires_grad_() for tensor in (case.x_TC, case.a_NrC, case.b_NCr)]
    x_TC, a_NrC, b_NCr = leaves

    def products() -> Tensor:
        parts = []
        for x_tC, a_rC, b_Cr in zip(torch.split(x_TC, case.sizes), a_NrC, b_NCr, strict=True):
            z_tr = x_tC @ a_rC.to(x_tC.dtype).t()
            parts.append(z_tr @ b_Cr.to(x_tC.dtype).t())
        return torch.cat(parts)

    return _by_autograd(case, leaves, products)


def grouped(case: Case) -> Variant:
    leaves = [tensor.clone().requires_grad_() for tensor in (case.x_TC, case.a_NrC, case.b_NCr)]
    x_TC, a_NrC, b_NCr = leaves
    ends_N = torch.tensor(case.sizes, device=x_TC.device).cumsum(0).to(torch.int32)

    def products() -> Tensor:
        a_NCr, b_NrC = (tensor.to(x_TC.dtype).transpose(1, 2) for tensor in (a_NrC, b_NCr))
        z_Tr = torch.nn.functional.grouped_mm(x_TC, a_NCr, offs=ends_N)
        y_TC: Tensor = torch.nn.functional.grouped_mm(z_Tr, b_NrC, offs=ends_N)
        return y_TC

    return _by_autograd(case, leaves, products)


def _by_autograd(case: Case, leaves: Sequence[Tensor], products: Callable[[], Tensor]) -> Variant:
    def run() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        y_TC = leaves[0] @ case.weight_CC.t() + case.scaling * products()
        y_TC.backward(case.dy_TC)
        return y_TC.detach()

    return Variant(run, lambda: (run(), *(leaf.grad for leaf in leaves if leaf.grad is not None)))


VARIANTS = {"bare": base_alone, "evenload": evenload, "loop": loop, "grouped": grouped}


def errors(case: Case, names: Sequence[str]) -> dict[str, float]:
    """The largest relative error of what each variant gives, against float64 of the same values."""
    exact = loop(Case(*(tensor.double() for tensor in case[:-1]), case.sizes)).passes()  # type: ignore[arg-type]
    return {name: max(map(relative, VARIANTS[name](case).passes(), exact)) for name in names}


def benchmark(asked: argparse.Namespace) -> Row:
    if asked.tiny:
        asked.hidden, asked.tokens = 64, 256
    device, rows = device_here(), []
    for tenants in asked.tenants:
        case = case_of(asked, tenants, device)
        names = [name for name in VARIANTS if name != "grouped" or case.x_TC.dtype == torch.bfloat16]
        ms = {name: milliseconds(VARIANTS[name](case).run, device) for name in names}
        row = {"tenants": tenants, "tokens": len(case.x_TC), "ms": ms, "error": errors(case, names[1:])}
        rows.append(row)
    return {**about(device), **{key: getattr(asked, key) for key in ("hidden", "rank", "dtype")}, "rows": rows}


def table(result: Row) -> Any:
    def over_bare(name: str) -> Any:
        def cell(row: Row) -> str:
            ms = row["ms"].get(name)
            return f"{ms:.2f} ms, {ms / row['ms']['bare']:.2f}x" if ms else ""

        return cell

    cells = {"tenants": "{tenants}", "tokens": "{tokens:,}", "bare": "{ms[bare]:.2f} ms"}
    cells |= {head: over_bare(head.partition(",")[0]) for head in ("evenload, over bare", "loop", "grouped")}
    cells |= {"error": lambda row: "\n".join(f"{name} {error:.1e}" for name, error in row["error"].items())}
    title = f"adapters of rank {result['rank']} on a layer of {result['hidden']}"
    return columns(f"{title}, {result['dtype']}, {result['device']}, measured", result["rows"], cells)


if __name__ == "__main__":
    sizes = {"hidden": 4096, "tokens": 16384, "tenants": [1, 8, 64], "rank": 16, "dtype": tuple(DTYPES)}
    asked = asked_for(options(__doc__, **sizes, tiny=False))
    show(benchmark(asked), asked, table)
