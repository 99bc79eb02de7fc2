"""Kernels by contract: every row of our tables over stand-ins with the real signatures; hosts that find the packages.

`signatures.json` says whose sources were read; what a host calls by another name than a version has would be seen here.
"""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from .conftest import said_by
from .signatures import signature, table

pytestmark = pytest.mark.slow

FLASH = [name.split()[1] for name in table() if name.startswith("flash_attn ")]
ENGINE = [name.split()[1] for name in table() if name.startswith("transformer_engine ")]
MEGATRON_ASKS_FOR = "2.9.0"
"""Of Transformer Engine, by the metadata of megatron-core 0.16.1: at least this, below 2.12."""

WALK = """
from rehearsal import kernels as own, ledger, packages
packages.install(**json.loads(sys.argv[1]))
import torch
from evenload.runtime.attention.blocks import BLOCKS, Inputs, merge
from evenload.runtime.attention.kernels import KERNELS, KernelCall, choose_kernel
from harness.attention import attention

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
    parts = [(q[before:], k, v)] if before else zip(*(t.split(LENGTHS) for t in (q, k, v)))
    out = torch.cat([attention(*part, width ** -0.5, window=window)[0] for part in parts])
    out.square().sum().backward()
    return out.detach(), x.grad

def error(found, wanted):
    return float((found.detach().cpu().double() - wanted).norm() / wanted.norm())

rows = []
for heads, groups, width, dtype, window in json.loads(sys.argv[2]):
    dtype = getattr(torch, dtype)
    out, grad = dense(inputs(heads, groups, width, dtype)[0], heads, groups, width, window)
    borders = torch.tensor(BORDERS, dtype=torch.int32).cuda()
    wants = frozenset({"window"} if window is not None else ())
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
        cuts = ((0, 64),) if window is not None else ((0, 20), (20, 64))
        parts = [
            Inputs(q.detach()[before:], k.detach()[a:b], v.detach()[a:b], b == 64, width ** -0.5, window)
            for a, b in cuts
        ]
        block_out, lse = block.forward(parts[0])
        for part in parts[1:]:
            block_out, lse = merge(block_out, lse, *block.forward(part))
        grads = [block.backward(2 * block_out, part, block_out, lse) for part in parts]
        dq, dk, dv = sum(row[0] for row in grads), *(torch.cat([row[i] for row in grads]) for i in (1, 2))
        found = torch.cat([torch.cat([torch.zeros_like(dq[:1]).expand(before, -1, -1), dq]), dk, dv], dim=1).flatten(1)
        errors = [error(block_out, out), error(found, grad)]
        rows.append(["cut", block.name, None, errors, dict(packages.calls), dict(own.calls)])
print("RESULTS" + json.dumps({"rows": rows, "faults": dict(ledger.counts["faults"])}), flush=True)
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


def walked(versions):
    said = said_by(WALK, json.dumps(versions), json.dumps(SHAPES))
    return json.loads(said.partition("RESULTS")[2])


@pytest.fixture(scope="module")
def walk():
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


def check_rows(result):
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


def test_every_row_of_our_tables_is_the_definition(walk):
    assert check_rows(walk) == set(CALLED)


def test_the_first_row_that_takes_the_inputs_is_chosen(walk):
    chosen = [row for kind, row, is_chosen, *_ in walk["rows"] if is_chosen]
    assert chosen == ["flash_attn"] * 4 + ["sdpa"] * 3, "odd heads, wide heads and float32 are for torch alone"


@pytest.mark.cuda
@pytest.mark.parametrize("flash", FLASH)
@pytest.mark.parametrize("engine", ENGINE)
def test_every_version_takes_our_calls(flash, engine):
    ran = check_rows(walked({"flash_attn": flash, "transformer_engine": engine}))
    assert CALLED.keys() - ran == ({("cut", "flash_attn")} if flash < "2.7" else set()), "pairs of blocks since 2.7"


CORE = Path(importlib.util.find_spec("megatron.core").submodule_search_locations[0])
TE = "extensions/transformer_engine.py"
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
    TE: {
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


def bound(package, name, tree, text):
    """How many calls of this text are there, all of which the function takes; else TypeError."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == text]
    known = signature(package, name)
    for call in calls:
        plain = [None for argument in call.args if not isinstance(argument, ast.Starred)]
        words = {word.arg: None for word in call.keywords if word.arg}
        whole = len(plain) == len(call.args) and len(words) == len(call.keywords)
        (known.bind if whole else known.bind_partial)(*plain, **words)
    return len(calls)


def test_the_host_calls_packages_by_names_that_they_have():
    """In the versions that Megatron-Core asks for; its general_gemm also needs `get_workspace`, gone since 2.11."""
    packages = {name.split()[0]: name for name in table()}
    packages["transformer_engine"] = f"transformer_engine {MEGATRON_ASKS_FOR}"
    trees = {file: ast.parse((CORE / file).read_text()) for file in SITES if (CORE / file).exists()}
    sites = [(tree, text, *site) for file, tree in trees.items() for text, site in SITES[file].items()]
    counts = [bound(packages[package], name, tree, text) for tree, text, package, name in sites]
    assert sum(counts) >= 10, "Megatron-Core has these calls elsewhere now"


@pytest.mark.parametrize("version", ENGINE)
def test_the_host_extends_modules_of_transformer_engine_by_names_that_they_have(version):
    kinds = [node for node in ast.walk(ast.parse((CORE / TE).read_text())) if isinstance(node, ast.ClassDef)]
    counts = [
        bound(f"transformer_engine {version}", f"{BASES[base]}.{method}", kind, f"super().{method}")
        for kind in kinds
        for base in filter(BASES.get, map(ast.unparse, kind.bases))
        for method in ("__init__", "forward")
    ]
    assert sum(counts) >= 8


SMALL = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_query_groups=2",
    "data.max_length=512", "train.global_batch_size=8", "train.steps=3",
)  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize(("case", "dtype"), [("slices", "bf16"), ("moe", "bf16"), ("quickstart", "fp64")])
def test_a_recipe_of_megatron_runs_where_the_packages_are(case, dtype, rehearse):
    """Their fused Adam, norms of gradients and gating are Megatron's own choice then; float64 is for none of them."""
    rehearse("kernels+megatron", ("train", case, *SMALL, f"train.dtype={dtype}"))


@pytest.mark.cuda
def test_a_run_with_the_fused_adam_goes_on_as_if_never_ended(rehearse, tmp_path):
    rows = []
    for folder, steps in (("whole", 4), ("kept", 2), ("kept", 4)):
        words = (*SMALL, "train.dtype=bf16", f"train.steps={steps}", f"checkpoint.dir={tmp_path / folder}", "--json")
        done, _ = rehearse("kernels+megatron", ("train", "slices", *words))
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
def test_experts_of_deepspeed_on_the_grouped_product(words, rehearse):
    done, _ = rehearse("deepspeed", ("train", "moe", *EXPERTS, *words))
    for ledger in done.outputs.glob("rank.*.json"):
        assert ("grouped product" in json.loads(ledger.read_text())["ops"]) == (len(words) == 1)
