"""The CPU bridge: Megatron-Core on a machine without CUDA, as rows.

Megatron-Core runs on gloo, but names CUDA all over: it asks for the current device, allocates on ``"cuda"``, keeps its
generator there, waits for streams and asserts on type strings. The rows answer these questions for the CPU. They come
in the order in which they must go on: torch's first, since Megatron reads some of them while it is imported.

Where CUDA is available no row applies but that for a missing Transformer Engine. Torch itself is left alone but for
`torch.cuda` calls that can only raise on such a machine, and for `Tensor.type` and `Tensor.cuda`, which answer
differently to Megatron's own modules alone.

Not bridged, since nothing on a CPU can stand in for it: Transformer Engine, sequence parallelism with torch's norms,
grouped GEMM, DeepEP and HybridEP, CUDA graphs, fine-grained offloading.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import Any

from ..integrations.host.versions import requirement
from .ledger import Ledger
from .row import Patch, from_module
from .slots import within

TORCH = requirement("torch")
MEGATRON = requirement("megatron-core")

_log = logging.getLogger(__name__)


def no_cuda() -> bool:
    """Whether torch finds no CUDA device here."""
    import torch

    return not torch.cuda.is_available()


def no_transformer_engine() -> bool:
    """Whether Megatron-Core does without Transformer Engine here, be there CUDA or not."""
    return not find_spec("transformer_engine")


def no_triton() -> bool:
    """Whether there is neither CUDA nor Triton here."""
    return no_cuda() and not find_spec("triton")


_of_torch, _of_megatron = (partial(Patch, supports=versions, when=no_cuda) for versions in (TORCH, MEGATRON))


def _stand_in(name: str) -> Callable[..., Any]:
    """A function of `cpu_standins` that is called with what it takes the place of."""
    return from_module(f".cpu_standins:{name}")


def _value(name: str) -> Callable[[Any], Any]:
    """Gives what `cpu_standins` has under a name, in place of whatever was there."""
    return lambda _: getattr(import_module(".cpu_standins", __package__), name)


def _cuda(name: str, stand_in: str, why: str) -> Patch:
    target = f"torch.cuda:{name}"
    return _of_torch(name=f"cpu.cuda.{name}", target=target, why=why, replace=_value(stand_in), reach=("megatron",))


_TORCH_ROWS = (
    _of_torch(
        name="cpu.dynamo",
        target="os:environ[TORCHDYNAMO_DISABLE]",
        why="Megatron's jit_fuser is torch.compile, 4 to 15 s of compiling per process on a CPU. Reaches every "
        "torch.compile made while it is set, child processes included; a value that the user has set is kept.",
        replace=lambda _: "1",
        fills_gap=True,
    ),
    _cuda(
        "current_device",
        "current_device",
        "Megatron passes it as device= in over 100 places; answers the CPU. Raises otherwise.",
    ),
    _cuda("synchronize", "synchronize", "Pipeline communication waits with it; nothing to wait for."),
    *(
        _cuda(name, stand_in, "The all-to-all token dispatcher overlaps copies on a side stream; on a CPU all is done.")
        for name, stand_in in (
            ("Stream", "Stream"),
            ("Event", "Event"),
            ("current_stream", "only_stream"),
            ("default_stream", "only_stream"),
            ("stream", "stream_context"),
        )
    ),
    *(
        _cuda(name, name, "Seeding and the tracker of tensor-parallel generators; the CPU generator takes the part.")
        for name in ("manual_seed", "get_rng_state", "set_rng_state")
    ),
    _of_torch(
        name="cpu.tensor.type",
        target="torch:Tensor.type",
        why="The distributed optimizer and gradient clipping compare it with 'torch.cuda.FloatTensor' in the middle of "
        "long methods. Callers outside megatron get torch's answer.",
        replace=_stand_in("type_method"),
    ),
    _of_torch(
        name="cpu.tensor.cuda",
        target="torch:Tensor.cuda",
        why="RoPE under context parallelism and the packing scheduler move tensors with it. Callers outside megatron "
        "get torch's error as before.",
        replace=_stand_in("cuda_method"),
    ),
)

_TRITON_ROWS = tuple(
    Patch(
        name=f"cpu.triton.{versions}",
        target=f"sys:modules[megatron.core.transformer.moe.{module}]",
        supports=MEGATRON,
        only=versions,
        when=no_triton,
        why="Upstream fault: the schedules import kernels of paged stashing, and these Triton, which builds of torch "
        "without CUDA leave out. A stand-in takes the module's place before the import; its functions, which only "
        "moe_paged_stash calls, raise.",
        replace=_value("MODULE_WITHOUT_TRITON"),
        fills_gap=True,
    )
    for versions, module in ((">=0.18,<0.19", "paged_stash"), (">=0.19", "ops.paged_stash"))
)

_GENERATOR_ROWS = tuple(
    _of_megatron(
        name=f"cpu.generator.{name}",
        target=f"megatron.core.tensor_parallel.random:{name}",
        why="Reads and sets the generator below torch.cuda, so the rows for torch.cuda miss it.",
        replace=_value(stand_in),
        expects=expects,
        reach=("megatron",),
    )
    for name, stand_in, expects in (
        ("_get_cuda_rng_state", "get_rng_state", ("device", "clone", "graph_safe")),
        ("_set_cuda_rng_state", "set_rng_state", ("new_state", "device", "graph_safe")),
    )
)

_QUIET_ROW = _of_megatron(
    name="cpu.generator.warning",
    target="megatron.core.tensor_parallel.random:logging",
    why="The tracker warns at every dropout that the CPU generator moved, and here it is the one that should. "
    "Its other messages pass.",
    replace=_value("LOGGING_WITHOUT_RNG_WARNING"),
    reach=(),
)

_ALLOCATES_ON_CUDA = (
    "datasets.data_schedule",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.state_dict_saver",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rope_utils",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "pipeline_parallel.hybrid_cp_schedule",
    "pipeline_parallel.schedules",
    "rerun_state_machine",
    "tensor_parallel.data",
    "transformer.moe.moe_utils",
    "transformer.utils",
    "utils",
)
"""Modules of 0.16.1 that pass the literal ``device="cuda"`` or ``pin_memory=True`` to a tensor factory."""

_ALLOCATION_ROWS = tuple(
    _of_megatron(
        name=f"cpu.torch.{module}",
        target=f"megatron.core.{module}:torch",
        why="The module allocates with device='cuda' written out, in the middle of its functions. Only its own global "
        "`torch` is replaced; the real torch is untouched.",
        replace=_value("TORCH_ON_CPU"),
        reach=(),
    )
    for module in _ALLOCATES_ON_CUDA
)

_EXPERT_ROWS = (
    _of_megatron(
        name="cpu.moe.te_general_gemm",
        target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        only="<0.17",
        why="Upstream fault: without Transformer Engine the name is never bound, and the router's gating raises "
        "NameError. None is what the code tests for.",
        replace=lambda _: None,
        when=no_transformer_engine,
        fills_gap=True,
        reach=(),
    ),
    _of_megatron(
        name="cpu.moe.split_sizes",
        target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        why="The all-to-all dispatcher wants its split sizes as numpy; upstream converts CUDA tensors only, and "
        "all_to_all_single refuses the rest.",
        wrapper=_stand_in("to_numpy_without_cuda"),
        expects=("tensor", "as_numpy", "record_stream"),
        aliases=("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",),
        reach=("megatron",),
    ),
)

_UNLIKE_ROWS = tuple(
    _of_megatron(
        name=f"cpu.gloo.{stand_in}",
        target=f"megatron.core.tensor_parallel.mappings:{name}",
        why="Where tensor parallelism cuts experts, ranks exchange as many rows as the router sent to each, which gloo "
        "does for equally many alone. Calls with equal parts are passed on.",
        wrapper=_stand_in(stand_in),
        expects=("input_", "group", sizes, "use_global_buffer"),
        reach=("megatron",),
    )
    for name, stand_in, sizes in (
        ("_gather_along_first_dim", "gather_unlike_parts", "output_split_sizes"),
        ("_reduce_scatter_along_first_dim", "reduce_unlike_parts", "input_split_sizes"),
    )
)

_CHECKPOINT_ROW = _of_megatron(
    name="cpu.checkpoint.init_data",
    target="megatron.core.dist_checkpointing.mapping:ShardedTensor.init_data",
    why="Fully parallel loading asks for shards on 'cuda'. Other devices are passed on.",
    wrapper=_stand_in("init_data_on_cpu"),
    expects=("device", "init_fn"),
)


def rows() -> tuple[Patch, ...]:
    """Every row of the bridge, in the order in which they go on."""
    return (
        *_TORCH_ROWS,
        *_TRITON_ROWS,
        *_GENERATOR_ROWS,
        _QUIET_ROW,
        *_ALLOCATION_ROWS,
        *_EXPERT_ROWS,
        *_UNLIKE_ROWS,
        _CHECKPOINT_ROW,
    )


def bridge_cpu(ledger: Ledger | None = None, *, lazy: bool = False) -> Ledger:
    """Make Megatron-Core run on the CPU; return the ledger whose `undo` takes the bridge down.

    With CUDA, or where another ledger of the process holds the bridge, nothing happens. Imports torch, and
    megatron.core too unless ``lazy``. Call it before megatron.core is imported if you can: what `torch.compile` has
    wrapped by then stays compiled, which is slow on a CPU and said in the log.

    Raises `EvenloadError` where megatron-core or torch is missing, of another version or changed.
    """
    ledger = ledger or Ledger()
    with warnings.catch_warnings():
        # Six times: that Transformer Engine and Apex are missing. On a CPU they always are.
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|apex).*")
        ledger.apply(rows(), lazy=lazy)
    if no_cuda() and _was_compiled():
        _log.warning(
            "megatron.core was imported before the CPU bridge: fusions that the config turns on will compile at first "
            "use (4 to 15 s). Bridge first, or set TORCHDYNAMO_DISABLE=1"
        )
    return ledger


def _was_compiled() -> bool:
    """Whether a loaded Megatron module holds a function that torch.compile has wrapped."""
    loaded = [module for name, module in list(sys.modules.items()) if within(name, ("megatron",))]
    values = (value for module in loaded for value in list(vars(module).values()))
    return any(isinstance(value, FunctionType) and "_torchdynamo_orig_callable" in vars(value) for value in values)
