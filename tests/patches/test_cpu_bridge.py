"""The CPU bridge on the real megatron-core, each order of import, apply and undo in a process of its own."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from evenload.integrations.host.versions import listed_version
from evenload.patches.cpu_bridge import no_triton
from packaging.version import Version

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the bridge is for machines without CUDA"),
]

needs_stock_import = pytest.mark.skipif(
    no_triton() and Version(listed_version("megatron-core") or "0") >= Version("0.18"),
    reason="without Triton this version cannot be imported before the bridge",
)

PRELUDE = """
import importlib, os, sys, tempfile, warnings
import torch
import torch._dynamo  # replaces torch.manual_seed when it is imported, which Megatron makes happen
torch.set_num_threads(1)
from evenload.patches import Ledger, bridge_cpu, cpu_bridge
from evenload.patches.row import is_needed_by_version
from evenload.patches.slots import MISSING, locate

ROWS = tuple(row for row in cpu_bridge.rows() if is_needed_by_version(row))

def states(ledger):
    "Of the rows that this version needs."
    return {status.row.name: status.state for status in ledger.table() if status.row in ROWS}

def everything():
    "Every name of torch.cuda and Tensor, every global of every Megatron module, and the environment."
    holders = {"torch": torch, "torch.cuda": torch.cuda, "Tensor": torch.Tensor}
    holders.update((name, module) for name, module in sys.modules.items() if name.startswith("megatron."))
    found = {(where, key): held for where, holder in holders.items() for key, held in vars(holder).items()}
    found.update(((where, cls, key), held) for (where, cls), c in list(found.items()) if isinstance(c, type)
                 and c.__module__.startswith("megatron.") for key, held in vars(c).items())
    return found, dict(os.environ)

def same(before, after):
    assert before[1] == after[1], set(before[1].items()) ^ set(after[1].items())
    assert before[0].keys() == after[0].keys(), before[0].keys() ^ after[0].keys()
    # CPython caches and torch's lazily made class attributes aside, identity of every single name.
    moved = [key for key, held in before[0].items() if after[0][key] is not held]
    moved = [key for key in moved if key[-1] not in ("__abstractmethods__", "_abc_impl", "__dict__", "__weakref__")]
    assert not moved, moved

def refuses(call):
    try:
        call()
    except (AssertionError, RuntimeError):
        return True

def losses(steps=2, experts=None):
    "Forward and backward of a tiny GPTModel; the same numbers in every process."
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
    if not dist.is_initialized():
        store = tempfile.NamedTemporaryFile()
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(123)
    warnings.simplefilter("ignore")
    more = dict(num_moe_experts=experts, moe_token_dispatcher_type="alltoall", add_bias_linear=False) if experts else {}
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
                               hidden_dropout=0.1, attention_dropout=0.0, **more)
    model = GPTModel(config, get_gpt_layer_local_spec(num_experts=experts), vocab_size=64, max_sequence_length=16,
                     position_embedding_type="rope", share_embeddings_and_output_weights=False)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(7))
    positions = torch.arange(16)[None].expand(2, -1)
    mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
    values = []
    for _ in range(steps):
        loss = model(tokens, positions, mask, labels=torch.roll(tokens, -1, 1)).mean()
        loss.backward()
        values.append(loss.item())
    assert all(p.grad is not None for p in model.parameters())
    assert 3.5 < values[0] < 5.0, values  # near log(64) = 4.16
    return values
"""


@pytest.fixture
def run(scripted: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> Callable[..., str]:
    """``run(code, **environment)`` in a fork of a process that has torch and nothing of ours; what it says."""

    def done(code: str, **env: str) -> str:
        script = tmp_path / "code.py"
        script.write_text(PRELUDE + textwrap.dedent(code))
        ready = f"import os; os.environ.pop('TORCHDYNAMO_DISABLE', None); os.environ.update({env!r})"
        ended = scripted("torch", tmp_path, script, planted=ready)
        assert ended.returncode == 0, ended.stderr[-6000:]
        return ended.stdout + ended.stderr

    return done


def test_bridge_import_undo_apply(run):
    """Before the import: quiet, complete, exactly undone, and the same numbers when it is put on again."""
    said = run("""
        warnings.simplefilter("error", UserWarning)
        before = everything()
        with bridge_cpu() as ledger:
            warnings.simplefilter("ignore")
            assert set(states(ledger).values()) == {"applied"}, ledger.table()
            assert len(states(ledger)) == len(ROWS)
            assert bridge_cpu(ledger) is ledger
            first = losses()
            experts = losses(experts=4)
            assert refuses(torch.ones(1).cuda), "outside megatron"
            assert torch.ones(1).type() == "torch.FloatTensor"
        after = everything()
        # What Megatron itself adds by being imported is no business of the bridge.
        assert "TORCHDYNAMO_DISABLE" not in after[1]
        same(before, tuple({key: new[key] for key in old} for old, new in zip(before, after)))
        assert vars(torch.cuda).keys() == {key for where, key in before[0] if where == "torch.cuda"}
        assert vars(torch.Tensor).keys() == {key for where, key in before[0] if where == "Tensor"}
        import megatron.core.pipeline_parallel.schedules as schedules
        assert schedules.torch is torch
        assert refuses(torch.cuda.current_device), "torch.cuda must answer as before"
        with bridge_cpu():
            assert losses() == first
            assert losses(experts=4) == experts
        print("done")
    """)
    lines = [line for line in said.splitlines() if not line.startswith("GPTModel IS DEPRECATED")]
    assert lines == ["done"], "the bridge must not chatter"


@needs_stock_import
def test_import_bridge_undo(run):
    """After the import: every global of every Megatron module is, by identity, what it was."""
    said = run("""
        warnings.simplefilter("ignore")
        import megatron.core, megatron.core.transformer.moe.token_dispatcher, megatron.core.optimizer
        import megatron.core.dist_checkpointing, megatron.core.models.gpt.gpt_model
        with bridge_cpu(): pass  # loads the modules that only rows name
        before = everything()
        ledger = bridge_cpu()
        assert everything()[0] != before[0]
        ledger.undo()
        same(before, everything())
    """)
    assert "megatron.core was imported before the CPU bridge" in said


def test_lazy_bridge_import_undo(run):
    """Nothing of Megatron is imported by a lazy bridge; its own import then brings the rows in."""
    run("""
        warnings.simplefilter("ignore")
        ledger = bridge_cpu(lazy=True)
        assert "megatron" not in sys.modules
        assert states(ledger)["cpu.cuda.current_device"] == "applied"
        assert states(ledger)["cpu.torch.utils"] == "pending"
        losses()
        ledger.undo()
        for row in ROWS:
            if row.module in sys.modules and row.fills_gap:
                assert locate(row.target).read() is MISSING
        assert not any(type(vars(module).get("torch")).__name__ == "TorchOnCpu" for module in sys.modules.values()
                       if hasattr(module, "__dict__"))
    """)


@needs_stock_import
def test_each_row_alone_is_undone_exactly(run):
    """Import, apply one row, undo: for every row of the bridge."""
    run("""
        warnings.simplefilter("ignore")
        import megatron.core, megatron.core.transformer.moe.token_dispatcher
        with bridge_cpu(): pass
        before = everything()
        for row in ROWS:
            slot = locate(row.target)
            raw = slot.read()
            with Ledger() as ledger:
                ledger.apply([row])
                assert [status.state for status in ledger.table()] == ["applied"], row
                assert slot.read() is not raw and slot.read() is not MISSING, row
                ledger.apply([row])
            assert slot.same(slot.read(), raw), row
        same(before, everything())
    """)


def test_a_setting_of_the_user_is_kept(run):
    run(
        """
        with bridge_cpu() as ledger:
            on = states(ledger)
            assert on.pop("cpu.dynamo") == "skipped" and set(on.values()) == {"applied"}
            assert os.environ["TORCHDYNAMO_DISABLE"] == "0"
        assert os.environ["TORCHDYNAMO_DISABLE"] == "0"
        """,
        TORCHDYNAMO_DISABLE="0",
    )


def test_where_there_is_cuda_one_row_applies_that_stands_for_transformer_engine(run):
    run("""
        torch.cuda.is_available = lambda: True
        before = everything()
        ledger = bridge_cpu(lazy=True)
        rest = {status.row.name for status in ledger.table() if status.state != "skipped"}
        assert rest <= {"cpu.moe.te_general_gemm"}, rest
        assert not any(name.startswith("megatron") for name in sys.modules)
        same(before, everything())
    """)


def test_another_version_of_megatron_is_refused_with_nothing_changed(run):
    run("""
        from importlib import metadata
        from evenload.core.errors import EvenloadError
        stock = metadata.version
        metadata.version = lambda name: "0.20.0" if name == "megatron-core" else stock(name)
        before = everything()
        try:
            bridge_cpu()
        except EvenloadError as refused:
            assert refused.found == "megatron-core 0.20.0" and ">=0.16.1" in refused.what
        else:
            raise SystemExit("0.20.0 was accepted")
        same(before, everything())
    """)
