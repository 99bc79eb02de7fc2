"""Signatures of the kernels that evenload calls, or that a host calls in a run of ours, as their own sources have them.

    python tests/rehearsal/signatures.py FOLDER > tests/rehearsal/signatures.json

FOLDER holds the unpacked sources, each as NAME-VERSION (`pip download --no-deps --no-binary :all: flash-attn==...` and
the like; what no index has is a file of its repository at a commit). The table keeps names of parameters, with "="
behind those that have a default and "/" and "*" as in Python, and for each package the file that was read: no code.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("signatures.json")
TE = "transformer_engine/pytorch/"
WANTED: dict[str, dict[str, tuple[str, ...]]] = {
    "flash_attn": {
        "flash_attn/flash_attn_interface.py": ("flash_attn_varlen_func", "_flash_attn_forward", "_flash_attn_backward"),
        "hopper/flash_attn_interface.py": ("flash_attn_varlen_func",),
    },
    "transformer_engine": {
        f"{TE}attention.py": ("DotProductAttention.__init__", "DotProductAttention.forward"),
        f"{TE}attention/dot_product_attention/dot_product_attention.py": (
            "DotProductAttention.__init__",
            "DotProductAttention.forward",
        ),
        f"{TE}attention/rope.py": ("apply_rotary_pos_emb",),
        f"{TE}cpp_extensions/gemm.py": ("general_gemm",),
        f"{TE}module/base.py": ("get_workspace",),
        f"{TE}module/grouped_linear.py": ("GroupedLinear.__init__", "GroupedLinear.forward"),
        f"{TE}module/layernorm.py": ("LayerNorm.__init__",),
        f"{TE}module/layernorm_linear.py": ("LayerNormLinear.__init__", "LayerNormLinear.forward"),
        f"{TE}module/linear.py": ("Linear.__init__", "Linear.forward"),
        f"{TE}module/rmsnorm.py": ("RMSNorm.__init__",),
        f"{TE}optimizers/fused_adam.py": ("FusedAdam.__init__", "FusedAdam.step"),
        f"{TE}permutation.py": ("moe_permute", "moe_unpermute", "moe_sort_chunks_by_index"),
    },
    "deep_ep": {
        "deep_ep/buffer.py": (
            "Buffer.__init__",
            "Buffer.get_dispatch_layout",
            "Buffer.dispatch",
            "Buffer.combine",
        )
    },
    "grouped_gemm": {"grouped_gemm/ops.py": ("gmm",)},
    "apex": {
        "apex/normalization/fused_layer_norm.py": ("FusedLayerNormAffineFunction.forward",),
        "apex/optimizers/fused_adam.py": ("FusedAdam.__init__", "FusedAdam.step"),
    },
}
"""By package and file what is read; a file that a version lacks is passed over."""


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{m.name}", m) for m in node.body if isinstance(m, ast.FunctionDef))


def parameters(function: ast.FunctionDef) -> str:
    """``a, b=, /, *, c, **rest``"""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    words = [a.arg + "=" * (number >= first_default) for number, a in enumerate(plain)]
    if arguments.posonlyargs:
        words.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg or arguments.kwonlyargs:
        words.append("*" + (arguments.vararg.arg if arguments.vararg else ""))
    words += [a.arg + "=" * (d is not None) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return ", ".join(words + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else []))


def read(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for source in sorted(folder.iterdir()):
        package, _, version = source.name.partition("-")
        for file, names in WANTED.get(package, {}).items():
            if (source / file).is_file():
                known = dict(functions(ast.parse((source / file).read_text())))
                rows = {name: parameters(known[name]) for name in names if name in known}
                table.setdefault(f"{package} {version}", {})[file] = rows
    return table


@cache
def table() -> dict[str, dict[str, dict[str, str]]]:
    """By package and version, by file, by name: the parameters."""
    return json.loads(TABLE.read_text())


@cache
def signature(package: str, name: str) -> inspect.Signature:
    """Of a function of "flash_attn 2.8.3.post2", say; without `self`. ``name`` is the last parts of file and name,
    "linear.py:Linear.forward"."""
    file, _, function = name.rpartition(":")
    rows = next(rows for at, rows in table()[package].items() if at.endswith(file) and function in rows)
    words = ", ".join(word.replace("=", "=None") for word in rows[function].split(", "))
    namespace: dict[str, Any] = {}
    exec(f"def function({words}): ...", namespace)
    whole = inspect.signature(namespace["function"])
    own = [p for p in whole.parameters.values() if p.name not in ("self", "ctx")]
    return whole.replace(parameters=own)


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1])), indent=1))
