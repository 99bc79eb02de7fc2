"""The rows for the distributed optimizer on torch's Adam: a checkpoint saved, loaded afresh, trained on.

One process plays all parts: three steps, save, two more steps are the reference; then a fresh model and optimizer load
under all rows, and under each set that lacks one, which must show the fault that the row mends.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs Megatron on the CPU"),
    pytest.mark.skipif(
        any(find_spec(name) for name in ("transformer_engine", "apex")), reason="the faults are those of torch's Adam"
    ),
]

FORMS = ("fully_reshardable", "dp_reshardable", "dp_zero_gather_scatter")
"""In which torch_dist keeps a distributed optimizer; Megatron-LM's own is the second."""


def test_a_resumed_optimizer_goes_on_as_if_never_stopped(tmp_path: Path, scripted) -> None:
    done = scripted("megatron", tmp_path, Path(__file__), tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    resumed = {form: said[form] for form in (*FORMS, "torch")}
    assert resumed == dict.fromkeys(resumed, said["reference"]), "resumed losses and weights must be bit-equal"
    assert said["without megatron.adam.fresh_state"] == "AssertionError"
    assert said["without megatron.adam.load_param_state"] == "KeyError"
    silent, reference = said["without megatron.adam.own_steps"].split(), said["reference"].split()
    assert silent[0] == reference[0]
    assert silent[1:] != reference[1:], "upstream's fault is silent at the first step and shows from the second"


def _main(folder: Path) -> None:
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from evenload.patches import Ledger, bridge_cpu, megatron_fixes

    bridge_cpu()
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(123)
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "use_cpu_initialization": True}
    config = TransformerConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0)
    positions = torch.arange(8)[None]
    mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)[None, None]

    rows = megatron_fixes.rows()

    def build():
        spec = get_gpt_layer_local_spec()
        model = GPTModel(config, spec, vocab_size=32, max_sequence_length=8, position_embedding_type="rope")
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
        ddp = DistributedDataParallel(config=config, ddp_config=settings, module=model)
        adam = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=1.0)
        return model, ddp, get_megatron_optimizer(adam, [ddp])

    def train(ddp, optimizer, steps):
        losses = []
        for step in steps:
            tokens = torch.randint(0, 32, (1, 8), generator=torch.Generator().manual_seed(step))
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            loss = ddp(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
            loss.backward()
            ddp.finish_grad_sync()
            optimizer.step()
            losses.append(loss.item().hex())
        weights = torch.cat([weight.detach().flatten().double() for weight in ddp.parameters()])
        return " ".join([*losses, weights.norm().item().hex()])

    def state(model, optimizer, form, loading):
        how = {"metadata": {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}}
        weights = model.sharded_state_dict(**how)
        return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, **how)}

    def resume(form, left_out=None):
        with Ledger() as ledger:
            ledger.apply(row for row in rows if row is not left_out)
            try:
                model, ddp, optimizer = build()
                if form == "torch":  # Megatron's oldest format
                    loaded = torch.load(folder / "common.pt", weights_only=False)
                else:
                    loaded = dist_checkpointing.load(state(model, optimizer, form, True), str(folder / form))
                model.load_state_dict(loaded["model"])
                optimizer.load_state_dict(loaded["optimizer"])
                if form == "torch":
                    optimizer.load_parameter_state(str(folder / "states.pt"))
                return train(ddp, optimizer, range(3, 6))
            except (AssertionError, KeyError) as error:
                return type(error).__name__

    model, ddp, optimizer = build()
    train(ddp, optimizer, range(3))
    for form in FORMS:
        (folder / form).mkdir()
        dist_checkpointing.save(state(model, optimizer, form, False), str(folder / form))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "common.pt")
    optimizer.save_parameter_state(str(folder / "states.pt"))
    print("reference:", train(ddp, optimizer, range(3, 6)))
    for form in (*FORMS, "torch"):
        print(f"{form}:", resume(form))
    for row in rows:
        print(f"without {row.name}:", resume("fully_reshardable", left_out=row))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
