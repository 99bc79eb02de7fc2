"""Kernels by contract: every row of our tables over stand-ins with the real signatures; hosts that find the packages.

`signatures.json` says whose sources were read; what a host calls by another name than a version has would be seen here.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from inspect import Signature
from pathlib import Path
from typing import Any

import pytest

from .conftest import TESTS
from .seen import seen_in
from .signatures import signature, table

pytestmark = pytest.mark.slow

FLASH = [name.split()[1] for name in table() if name.startswith("flash_attn ")]
ENGINE = [name.split()[1] for name in table() if name.startswith("transformer_engine ")]
MEGATRON_ASKS_FOR = "2.9.0"
"""Of Transformer Engine, by the metadata of megatron-core 0.16.1: at least this, below 2.12."""

WALK = """
import json, os, sys
sys.path.insert(0, {tests!r})
os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
import rehearsal
rehearsal.install()
from rehearsal import kernels as own, ledger, packages
packages.install(**json.loads(sys.argv[1]))
import torch
from evenload.runtime.attention.blocks import BLOCKS, Inputs
from evenload.runtime.attention.kernels import KERNELS, KernelCall, choose_kernel

GPU, LENGTHS = torch.device("cuda", 0), (1, 7, 40, 16)
BORDERS = (0, 1, 8, 48, 64)

def inputs(heads, groups, width, dtype):
    "Queries, keys and values as views of one fused projection, as hosts hand them over."
    torch.manual_seed(heads * 1000 + width)
    fused = torch.randn(64, (heads + 2 * groups) * width).to(dtype).cuda().requires_grad_()
    q, k, v = fused.view(64, heads + 2 * groups, width).split((heads, groups, groups), dim=1)
    return fused, q, k, v

def dense(fused, heads, groups, width, window, before=None):
    "By the definition, in float64 on the host: the output and the gradient of its sum of squares."
    x = fused.detach().cpu().double().requires_grad_()
    q, k, v = x.view(64, -1, width).split((heads, groups, groups), dim=1)
    k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
    place = torch.arange(64)
    sample = torch.bucketize(place, torch.tensor(BORDERS[1:]), right=True) if before is None else torch.zeros(64)
    behind = place[:, None] - place
    seen = (sample[:, None] == sample) & (behind >= 0) & (behind <= (64 if window is None else window))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * width ** -0.5
    out = torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    if before is not None:
        out = out[before:]
    out.square().sum().backward()
    return out.detach(), x.grad

def error(found, wanted):
    return float((found.detach().cpu().double() - wanted).norm() / wanted.norm())

rows = []
for heads, groups, width, dtype, window in json.loads(sys.argv[2]):
    dtype = getattr(torch, dtype)
    out, grad = dense(inputs(heads, groups, width, dtype)[0], heads, groups, width, window)
    borders = torch.tensor(BORDERS, dtype=torch.int32).cuda()
    wants = frozenset({{"window"}} if window is not None else ())
    chosen = choose_kernel(GPU, dtype, width, wants).name
    for kernel in KERNELS:
        if not (kernel.available() and kernel.supports(dtype, GPU, width) and wants <= kernel.options):
            continue
        fused, q, k, v = inputs(heads, groups, width, dtype)
        packages.calls.clear(); own.calls.update(forward=0, backward=0)
        own_out = kernel.run(KernelCall(q, k, v, borders, BORDERS, 40, width ** -0.5, window))
        own_out.square().sum().backward()
        errors = [error(own_out, out), error(fused.grad, grad)]
        rows.append(["whole", kernel.name, kernel.name == chosen, errors, dict(packages.calls), dict(own.calls)])
    before = 24
    out, grad = dense(inputs(heads, groups, width, dtype)[0], heads, groups, width, window, before)
    for block in BLOCKS:
        can = window is None or "window" in block.options
        if not (block.available() and block.supports(dtype, GPU, width) and can):
            continue
        fused, q, k, v = inputs(heads, groups, width, dtype)
        packages.calls.clear(); own.calls.update(forward=0, backward=0)
        x = Inputs(q.detach()[before:], k.detach(), v.detach(), True, width ** -0.5, window)
        block_out, lse = block.forward(x)
        dq, dk, dv = block.backward((2 * block_out), x, block_out, lse)
        found = torch.cat([torch.cat([torch.zeros_like(dq[:1]).expand(before, -1, -1), dq]), dk, dv], dim=1).flatten(1)
        errors = [error(block_out, out), error(found, grad)]
        rows.append(["cut", block.name, None, errors, dict(packages.calls), dict(own.calls)])
print("RESULTS" + json.dumps({{"rows": rows, "faults": dict(ledger.counts["faults"])}}), flush=True)
os._exit(0)
"""
SHAPES = [
    (4, 4, 16, "bfloat16", None),
    (4, 2, 64, "bfloat16", None),
    (4, 1, 256, "float16", None),
    (4, 2, 64, "bfloat16", 5),
    (4, 2, 20, "bfloat16", None),
    (4, 2, 264, "bfloat16", None),
    (4, 2, 64, "float32", 5),
]
"""Query heads, key and value heads, head dimension, dtype, window; the last three are for no kernel of a GPU."""


def walked(versions: dict[str, str]) -> dict[str, Any]:
    program = WALK.format(tests=str(TESTS))
    command = [sys.executable, "-c", program, json.dumps(versions), json.dumps(SHAPES)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False
    )
    assert "RESULTS" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.partition("RESULTS")[2])


@pytest.fixture(scope="module")
def walk() -> dict[str, Any]:
    return walked({"flash_attn": FLASH[-1], "transformer_engine": MEGATRON_ASKS_FOR})


CALLED = {
    ("whole", "flash_attn"): "flash_attn_interface.py:flash_attn_varlen_func",
    ("whole", "transformer_engine"): "attention.py:DotProductAttention.forward",
    ("whole", "torch_varlen"): "",
    ("whole", "sdpa"): None,
    ("cut", "flash_attn"): "flash_attn_interface.py:_flash_attn_backward",
    ("cut", "torch_flash"): "",
    ("cut", "plain"): None,
}
"""By row of our tables the function of a package that it calls; "": torch's own flash kernels; None: no kernel."""


def check_rows(result: dict[str, Any]) -> set[tuple[str, str]]:
    """Every row within its rounding of the definition; which rows ran."""
    assert not result["faults"]
    for kind, row, _, errors, called, own in result["rows"]:
        assert max(errors) < 2e-2, (row, errors)
        wanted = CALLED[kind, row]
        if wanted is None:
            assert not called
            assert not own["forward"]
        else:
            assert own["forward"] or row == "transformer_engine", row
            assert not wanted or called[wanted], (row, called)
    return {(kind, row) for kind, row, *_ in result["rows"]}


def test_every_row_of_our_tables_is_the_definition(walk: dict[str, Any]) -> None:
    assert check_rows(walk) == set(CALLED)


def test_the_first_row_that_takes_the_inputs_is_chosen(walk: dict[str, Any]) -> None:
    chosen = [row for kind, row, is_chosen, *_ in walk["rows"] if is_chosen]
    assert chosen == ["flash_attn"] * 4 + ["sdpa"] * 3, "odd heads, wide heads and float32 are for torch alone"


@pytest.mark.cuda
@pytest.mark.parametrize("flash", FLASH)
@pytest.mark.parametrize("engine", ENGINE)
def test_every_version_takes_our_calls(flash: str, engine: str) -> None:
    ran = check_rows(walked({"flash_attn": flash, "transformer_engine": engine}))
    assert CALLED.keys() - ran == ({("cut", "flash_attn")} if flash < "2.7" else set()), "pairs of blocks since 2.7"


CORE = Path(importlib.util.find_spec("megatron.core").submodule_search_locations[0])
SITES = {
    "transformer/moe/fused_a2a.py": {
        "Buffer": ("deep_ep", "buffer.py:Buffer.__init__"),
        "buffer.get_dispatch_layout": ("deep_ep", "buffer.py:Buffer.get_dispatch_layout"),
        "buffer.dispatch": ("deep_ep", "buffer.py:Buffer.dispatch"),
        "buffer.combine": ("deep_ep", "buffer.py:Buffer.combine"),
    },
    "transformer/moe/experts.py": {"gg.ops.gmm": ("grouped_gemm", "ops.py:gmm")},
    "fusions/fused_layer_norm.py": {
        "FusedLayerNormAffineFunction.apply": ("apex", "fused_layer_norm.py:FusedLayerNormAffineFunction.forward")
    },
    "extensions/transformer_engine.py": {
        "te.pytorch.LayerNorm": ("transformer_engine", "layernorm.py:LayerNorm.__init__"),
        "te.pytorch.RMSNorm": ("transformer_engine", "rmsnorm.py:RMSNorm.__init__"),
        "general_gemm": ("transformer_engine", "gemm.py:general_gemm"),
    },
}
"""Where Megatron-Core calls packages that a run of ours may meet, by the text of the call."""
BASES = {
    "te.pytorch.DotProductAttention": "attention.py:DotProductAttention",
    "te.pytorch.GroupedLinear": "grouped_linear.py:GroupedLinear",
    "te.pytorch.LayerNormLinear": "layernorm_linear.py:LayerNormLinear",
    "te.pytorch.Linear": "linear.py:Linear",
}


def calls_in(tree: ast.AST, text: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == text:
            yield node


def bind(known: Signature, call: ast.Call) -> None:
    """Raises TypeError: the call names what the function does not know, or leaves out what it needs."""
    whole = not any(isinstance(a, ast.Starred) for a in call.args) and all(word.arg for word in call.keywords)
    words = {word.arg: None for word in call.keywords if word.arg}
    plain = [None for argument in call.args if not isinstance(argument, ast.Starred)]
    (known.bind if whole else known.bind_partial)(*plain, **words)


def test_the_host_calls_packages_by_names_that_they_have() -> None:
    """In the versions that Megatron-Core asks for; its general_gemm also needs `get_workspace`, gone since 2.11."""
    packages = {name.split()[0]: name for name in table()} | {
        "transformer_engine": f"transformer_engine {MEGATRON_ASKS_FOR}"
    }
    bound = 0
    for file, sites in SITES.items():
        if (CORE / file).exists():
            tree = ast.parse((CORE / file).read_text())
            for text, (package, name) in sites.items():
                for call in calls_in(tree, text):
                    bind(signature(packages[package], name), call)
                    bound += 1
    assert bound >= 10, "Megatron-Core has these calls elsewhere now"


@pytest.mark.parametrize("version", ENGINE)
def test_the_host_extends_modules_of_transformer_engine_by_names_that_they_have(version: str) -> None:
    tree = ast.parse((CORE / "extensions/transformer_engine.py").read_text())
    bound = 0
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for base in filter(BASES.get, map(ast.unparse, kind.bases)):
            for method in ("__init__", "forward"):
                for call in calls_in(kind, f"super().{method}"):
                    bind(signature(f"transformer_engine {version}", f"{BASES[base]}.{method}"), call)
                    bound += 1
    assert bound >= 8


SMALL = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_query_groups=2",
    "data.max_length=512", "train.global_batch_size=8", "train.steps=3",
)  # fmt: skip
INSTALLED: dict[str, tuple[str, ...]] = {
    "slices": (*SMALL, "train.dtype=bf16"),
    "moe": (*SMALL, "train.dtype=bf16"),
    "quickstart": (*SMALL, "train.dtype=fp64"),
}


@pytest.mark.cuda
@pytest.mark.parametrize("case", INSTALLED)
def test_a_recipe_of_megatron_runs_where_the_packages_are(case: str, forge: Any, tmp_path: Path) -> None:
    """Their fused Adam, norms of gradients and gating are Megatron's own choice then; float64 is for none of them."""
    done = forge("cuda+kernels+megatron").run(tmp_path, ("train", case, *INSTALLED[case]), 2)
    assert done.returncode == 0, done.stderr[-3000:]
    seen_in(done.outputs).check()


@pytest.mark.cuda
def test_a_run_with_the_fused_adam_goes_on_as_if_never_ended(forge: Any, tmp_path: Path) -> None:
    rows: list[Any] = []
    for folder, steps in (("whole", 4), ("kept", 2), ("kept", 4)):
        words = (*SMALL, "train.dtype=bf16", f"train.steps={steps}", f"checkpoint.dir={tmp_path / folder}", "--json")
        done = forge("cuda+kernels+megatron").run(tmp_path, ("train", "slices", *words), 2)
        assert done.returncode == 0, done.stderr[-3000:]
        seen_in(done.outputs).check()
        rows.append([(row["step"], row["loss"]) for row in json.loads(done.stdout)["steps"]])
    assert rows[1] + rows[2] == rows[0]
    assert len(rows[2]) == 2, "the second run began anew"


EXPERTS = (
    "trainer=deepspeed", "train.dtype=bf16", *SMALL, "model.moe.score=softmax", "model.moe.bias_rate=0",
    "model.moe.sequence_aux_loss=0",
)  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize(
    "words",
    [("parallel.ep=1",), ("parallel.ep=2",), ("parallel.ep=2", "model.moe.ffn_hidden_size=20")],
    ids=["whole", "divided", "rows of 40 bytes"],
)
def test_experts_of_deepspeed_on_the_grouped_product(words: tuple[str, ...], forge: Any, tmp_path: Path) -> None:
    done = forge("cuda+deepspeed").run(tmp_path, ("train", "moe", *EXPERTS, *words), 2)
    assert done.returncode == 0, done.stderr[-3000:]
    seen_in(done.outputs).check()
    for ledger in done.outputs.glob("rank.*.json"):
        assert ("grouped product" in json.loads(ledger.read_text())["ops"]) == (len(words) == 1)
