"""Megatron-LM's own scripts on a machine without CUDA: what the CPU bridge of evenload, which knows the package
megatron.core alone, does not carry. The same for stock runs and for runs with plugins.

`sitecustomize` imports it where HOSTS_MEGATRON names a folder. The ranks leave ``RANK.json`` in it (see `measured`),
and, where HOSTS_FLOAT64 is set, run in float64 and leave the gradients of their first update in ``RANK.pt``.
"""

import json
import os
import sys
import time
import types
import typing
from collections import deque
from importlib import metadata, util

import wrapt

FOLDER = os.environ["HOSTS_MEGATRON"]
NEEDS_TRITON = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
TRAINING = ("arguments", "checkpointing", "initialize", "training", "training_config", "utils", "yaml_arguments")
SINCE_0_19 = ("models.dist_utils", "utils.common_utils", "utils.utils")
computed, ends = [0], []
"""Places of input that passes with gradients computed on this rank; seconds at the end of each update."""


class WithoutTriton(types.ModuleType):
    """A module whose kernels are asked for by name and never called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*words, **options):
            raise RuntimeError(f"{name} needs triton")

        return missing


class OneDevice(types.ModuleType):
    """``torch.cuda`` as megatron.training sees it: a device is there, which is the CPU."""

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    set_device = reset_peak_memory_stats = empty_cache = check_error = staticmethod(lambda *words: None)
    memory_stats = memory_summary = staticmethod(lambda *words: {})
    memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = staticmethod(lambda *words: 0)
    device_memory_used = staticmethod(lambda *words: 0)
    mem_get_info = staticmethod(lambda *words: (2**34, 2**34))
    get_device_properties = staticmethod(lambda *words: types.SimpleNamespace(major=9, minor=0, name="CPU"))
    get_device_capability = staticmethod(lambda *words: (9, 0))
    get_device_name = staticmethod(lambda *words: "CPU")

    def __getattr__(self, name):
        import torch

        return getattr(torch.cuda, name)


def on_cpu(module):
    """The module allocates where it asks for a CUDA device."""
    from evenload.patches.cpu_standins import TorchOnCpu

    module.torch = TorchOnCpu()
    module.torch.cuda = OneDevice("torch.cuda")


for name in TRAINING + SINCE_0_19:
    wrapt.when_imported(f"megatron.training.{name}")(on_cpu)


@wrapt.when_imported("megatron.training.arguments")
def _in_float64(module):
    validate = module.validate_args

    def validate_args(args, *words, **options):
        args = validate(args, *words, **options)
        if "HOSTS_FLOAT64" in os.environ:
            import torch

            args.params_dtype, args.clip_grad = torch.float64, 0.0
            torch.set_default_dtype(torch.float64)
        return args

    module.validate_args = validate_args


@wrapt.when_imported("megatron.training.training")
def _keep_gradients(module):
    """Those of the first update, of this rank's parameters by chunk and name."""
    finalize = module.finalize_model_grads

    def finalize_model_grads(model, *words, **options):
        import torch

        finalize(model, *words, **options)
        path = os.path.join(FOLDER, f"{os.environ['RANK']}.pt")
        if "HOSTS_FLOAT64" in os.environ and not os.path.exists(path):
            named = (
                (f"{place}.{name}", weight)
                for place, chunk in enumerate(model)
                for name, weight in chunk.named_parameters()
            )
            torch.save({name: weight.main_grad.clone() for name, weight in named}, path)

    module.finalize_model_grads = finalize_model_grads


@wrapt.when_imported("megatron.training.training")
@wrapt.when_imported("megatron.training.initialize")
def _without_fusions(module):
    module.set_jit_fusion_options = lambda *words, **options: None


@wrapt.when_imported("megatron.legacy.fused_kernels")
def _without_kernels(module):
    module.load = lambda args: None


@wrapt.when_imported("megatron.core.datasets.utils")
def _with_helpers(module):
    """Megatron-LM compiles its helpers in its checkout; those of the installed package are compiled."""
    module.compile_helpers = lambda: None
    name = "megatron.core.datasets.helpers_cpp"
    for file in metadata.files("megatron-core") or ():
        if name not in sys.modules and file.match("helpers_cpp*.so"):
            spec = util.spec_from_file_location(name, file.locate())
            sys.modules[name] = util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])


@wrapt.when_imported("torch")
def _torch(torch):
    """`Tensor.cuda` and ``.to("cuda")`` stay where they are, nccl is gloo, and updates are timed."""
    torch.Tensor.cuda = lambda self, *words, **options: self
    for owner in (torch.Tensor, torch.nn.Module):
        _stays(owner, owner.to)
    torch.cuda.set_device = lambda device: None
    start = torch.distributed.init_process_group

    def start_on_gloo(backend=None, **options):
        start("gloo", **{name: value for name, value in options.items() if name != "device_id"})

    torch.distributed.init_process_group = start_on_gloo
    if "HOSTS_FLOAT64" in os.environ:
        torch.Tensor.float = torch.Tensor.double


def _stays(owner, to):
    def stay(self, *words, **options):
        kept = ["cpu" if str(word).startswith("cuda") else word for word in words]
        return to(self, *kept, **options)

    owner.to = stay


def note_update(*_):
    """After an optimizer's step, of which a chain of optimizers takes several for one update."""
    if not ends or ends[-1][1] != computed[0]:
        ends.append((time.perf_counter(), computed[0]))


@wrapt.when_imported("torch.optim.optimizer")
def _time(module):
    module.register_optimizer_step_post_hook(note_update)


@wrapt.when_imported("megatron.core.transformer.torch_norm")
def _norms(module):
    """torch's norms work on shares of a sequence as on anything else; Megatron's wrapper refuses them."""
    make = module.WrappedTorchNorm.__new__

    def norm_in_shares(cls, config, *words, **options):
        shares, config.sequence_parallel = config.sequence_parallel, False
        norm = make(cls, config, *words, **options)
        config.sequence_parallel = shares
        for parameter in norm.parameters():
            parameter.sequence_parallel = shares
        return norm

    module.WrappedTorchNorm.__new__ = norm_in_shares


@wrapt.when_imported("megatron.core.pipeline_parallel.schedules")
def _keep_outputs(module):
    """An output is freed while gloo may still send it; on a GPU the stream keeps it."""
    free, sent = module.deallocate_output_tensor, deque(maxlen=64)

    def free_later(out, *words):
        if hasattr(out, "data"):  # 0.19 calls this for each tensor of a list
            sent.append(out.data)
        free(out, *words)

    module.deallocate_output_tensor = free_later


@wrapt.when_imported("megatron.core.tensor_parallel.layers")
def _count(module):
    import torch

    embed = module.VocabParallelEmbedding.forward

    def forward(self, input_):
        if self.training and torch.is_grad_enabled():
            computed[0] += input_.numel()
        return embed(self, input_)

    module.VocabParallelEmbedding.forward = forward


def leave(rank):
    if ends:
        with open(os.path.join(FOLDER, f"{rank}.json"), "w") as file:
            json.dump({"tokens": computed[0], "steps": [seconds for seconds, _ in ends], "log": []}, file)


if util.find_spec("triton") is None:
    sys.modules[NEEDS_TRITON] = WithoutTriton(NEEDS_TRITON)
if not hasattr(typing, "override"):
    typing.override = lambda method: method  # Megatron-LM 0.19 takes it from there, Python 3.11 lacks it
