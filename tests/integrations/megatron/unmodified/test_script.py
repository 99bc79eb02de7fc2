"""A Megatron-Core script that nobody edited, stock and with evenload: by torchrun, forked, and in one process."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[3] / "scripts" / "megatron_script.py"
CAP = 128
ON = f"trainer: megatron\nplugins: {{packing: {{enabled: true, max_tokens: {CAP}}}}}\n"
ORDERED = f"trainer: megatron\nplugins: {{pipeline: {{enabled: true, max_tokens: {CAP // 4}}}}}\n"
OFF = "trainer: megatron\n"


def start(folder: Path, name: str, recipe: str, ranks: int, words: tuple[str, ...], scripted=None) -> dict:
    """Run the script by torchrun through `evenload run`, or forked and enabled; results by dtype and rank."""
    import torch

    out = folder / name
    out.mkdir()
    (out / "recipe.yaml").write_text(recipe)
    if scripted:
        enable = f"import evenload; evenload.enable({str(out / 'recipe.yaml')!r})"
        done = scripted("megatron", out, SCRIPT, "--out", out, *words, ranks=ranks, planted=enable)
    else:
        done = launch(out, ranks, words)
        assert "nothing was switched on" not in done.stderr
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        dtype: [torch.load(out / f"{dtype}.rank{rank}.pt") for rank in range(ranks)]
        for dtype in ("fp32", "fp64")
        if dtype in words
    }


def launch(out: Path, ranks: int, words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    if "lo" in (interface for _, interface in socket.if_nameindex()):
        env["GLOO_SOCKET_IFNAME"] = "lo"
    evenload = [sys.executable, "-m", "evenload", "run", str(out / "recipe.yaml"), "--"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*evenload, *torchrun, str(SCRIPT), "--out", str(out), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory, scripted):
    """(stock, planned) results of 2 data-parallel ranks, gradient reduction overlapped; planned by torchrun."""
    folder = tmp_path_factory.mktemp("dp")
    words = ("--dtypes", "fp32", "fp64", "--overlap")
    return start(folder, "stock", OFF, 2, words, scripted), start(folder, "planned", ON, 2, words)


def test_a_rank_without_evenload_is_named_and_not_waited_for(tmp_path, scripted):
    (tmp_path / "recipe.yaml").write_text(ON)
    planted = (
        "import os, evenload\nfrom evenload.integrations.unmodified.planned_runs import watch_process\n"
        f"if os.environ['RANK'] == '0':\n    watch_process()\n    evenload.enable({str(tmp_path / 'recipe.yaml')!r})"
    )
    words = ("--out", tmp_path, "--dtypes", "fp32")
    done = scripted("megatron", tmp_path, SCRIPT, *words, ranks=2, planted=planted)
    assert done.returncode == 1
    assert done.stderr.count("evenload: ") == done.stderr.count("evenload: rank 1 of 2 runs without evenload") == 1


def worst(name: str, planned: dict, stock: dict) -> float:
    """Largest ||a - b|| / ||b|| over the tensors."""
    return max(float((planned[name][p] - t).norm() / t.norm()) for p, t in stock[name].items())


def computed(result: dict) -> int:
    return sum(rows * tokens for rows, tokens in result["shapes"])


def test_in_float64_the_same_gradients_and_weights(data_parallel):
    for stock, planned in zip(*(results["fp64"] for results in data_parallel), strict=True):
        assert worst("gradients", planned, stock) < 1e-12
        assert worst("weights", planned, stock) < 1e-10


def test_in_float32_the_same_losses_and_weights_under_the_distributed_optimizer(data_parallel):
    for stock, planned in zip(*(results["fp32"] for results in data_parallel), strict=True):
        for (loss, num_tokens), (wanted, wanted_tokens) in zip(planned["losses"], stock["losses"], strict=True):
            assert loss == pytest.approx(wanted, rel=1e-6)
            assert num_tokens == wanted_tokens
        assert worst("weights", planned, stock) < 1e-4
        assert planned["weights"].keys() == stock["weights"].keys()


def test_packs_under_the_cap_are_computed_in_place_of_padding(data_parallel):
    for stock, planned in zip(*(results["fp32"] for results in data_parallel), strict=True):
        assert set(stock["shapes"]) == {(2, 64)}
        assert all(rows == 1 and tokens <= CAP for rows, tokens in planned["shapes"])
        assert computed(planned) < computed(stock) / 2


def test_evaluation_is_left_alone(data_parallel):
    for stock, planned in zip(*(results["fp64"] for results in data_parallel), strict=True):
        assert planned["evaluated"] == stock["evaluated"] == [(2, 64)] * 3
        assert planned["evaluation"] == pytest.approx(stock["evaluation"], rel=1e-12)


@pytest.mark.parametrize(("kind", "recipe"), [("--pp", ORDERED), ("--tp", ON)], ids=["pp", "tp"])
def test_pipeline_or_tensor_parallel_beside_data_parallel(tmp_path, kind, recipe, scripted):
    words = ("--dtypes", "fp64", kind, "2", "--overlap")
    results = [start(tmp_path, *case, 4, words, scripted) for case in (("stock", OFF), ("planned", recipe))]
    for before, after in zip(*(one["fp64"] for one in results), strict=True):
        assert worst("gradients", after, before) < 1e-12
        assert worst("weights", after, before) < 1e-10
        assert [tokens for _, tokens in after["losses"]] == [tokens for _, tokens in before["losses"]]
        assert computed(after) < computed(before) / 2


# In one process, on top of a CPU bridge that stays.


def load_script():
    """The script as a module, and Megatron ready for it on one rank."""
    import torch
    from evenload.patches import bridge_cpu

    bridge_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1234)
    if "megatron_script" not in sys.modules:
        spec = importlib.util.spec_from_file_location("megatron_script", SCRIPT)
        sys.modules["megatron_script"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["megatron_script"])
    torch.set_num_threads(1)
    return sys.modules["megatron_script"]


def recipe_of(max_tokens: int, slices: str = "even"):
    from evenload.api import load_plugins
    from evenload.core.recipe import recipe

    load_plugins()
    return recipe.parse({"plugins": {"packing": {"enabled": True, "max_tokens": max_tokens, "slices": slices}}})


def with_mask(batches):
    import torch

    for batch in batches:
        size = batch["tokens"].shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).triu(1)
        yield {**batch, "attention_mask": mask.expand(len(batch["tokens"]), 1, size, size)}


def other_losses(max_tokens: int) -> dict:
    """Gradient errors of planned against stock steps, for scripts that differ a little."""
    import evenload
    import torch

    script, told = load_script(), {}

    def masked_step(shapes, data_iterator, model):
        batch = next(data_iterator)
        shapes.append(tuple(batch["tokens"].shape))
        output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
        return output, partial(script.loss_func, batch["loss_mask"])

    def recomputed(*args):
        model, optimizer = build(*args)
        model.config.recompute_granularity, model.config.recompute_method = "full", "uniform"
        model.config.recompute_num_layers = 1
        return model, optimizer

    build, batches, step = script.build, script.batches, script.forward_step
    for name, positions, changes in (
        ("learned positions", "learned_absolute", {}),
        ("recomputation", "rope", {"build": recomputed}),
        ("masks", "rope", {"batches": lambda: with_mask(batches()), "forward_step": masked_step}),
    ):
        vars(script).update({"build": build, "batches": batches, "forward_step": step} | changes)
        stock = script.train(torch.float64, positions, False)
        with evenload.enabled(recipe_of(max_tokens)):
            planned = script.train(torch.float64, positions, False)
        assert computed(planned) < computed(stock)
        told[name] = worst("gradients", planned, stock)
    vars(script).update({"build": build, "batches": batches, "forward_step": step})
    return told


@pytest.mark.parametrize("max_tokens", [CAP, 64])
def test_other_scripts_are_exact_too(world, max_tokens):
    (told,) = world(1).run(other_losses, max_tokens)
    assert len(told) == 3
    assert all(error < 1e-12 for error in told.values()), told


def identities() -> dict:
    """What a loop holds before, during and after a session, and what a held function does then."""
    import evenload
    import torch
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    script = load_script()
    held_before = {
        "schedule": schedules.get_forward_backward_func,
        "alias": script.get_forward_backward_func,
        "attention": vars(DotProductAttention)["forward"],
    }
    session = evenload.enable(recipe_of(CAP))
    changed = [
        schedules.get_forward_backward_func is not held_before["schedule"],
        script.get_forward_backward_func is schedules.get_forward_backward_func,
        vars(DotProductAttention)["forward"] is not held_before["attention"],
    ]
    model, _ = script.build(torch.float64, "rope", False)
    held, shapes = script.get_forward_backward_func(), []
    call = {
        "forward_step_func": partial(script.forward_step, shapes),
        "data_iterator": script.batches(),
        "model": [model],
        "num_microbatches": 2,
        "seq_length": 64,
        "micro_batch_size": 2,
    }
    held(**call)
    planned = list(shapes)
    hooks, variable = len(model.module._forward_pre_hooks), model.config.variable_seq_lengths
    session.disable()
    restored = [
        schedules.get_forward_backward_func is held_before["schedule"],
        script.get_forward_backward_func is held_before["alias"],
        vars(DotProductAttention)["forward"] is held_before["attention"],
    ]
    shapes.clear()
    held(**call)
    return {"changed": changed, "restored": restored, "planned": planned, "held": shapes, "left": (hooks, variable)}


def test_disable_restores_every_symbol_and_functions_that_a_loop_holds(world):
    (told,) = world(1).run(identities)
    assert told["changed"] == told["restored"] == [True] * 3
    assert all(rows == 1 for rows, _ in told["planned"])
    assert told["held"] == [(2, 64)] * 2
    assert told["left"] == (0, False)


def refusals() -> dict[str, str]:
    """What each kind of unsupported loop is told."""
    import evenload
    import torch
    from evenload.core.errors import EvenloadError

    script, told = load_script(), {}
    model, _ = script.build(torch.float64, "rope", False)
    overlapped, _ = script.build(torch.float64, "rope", True)
    overlapped.config.no_sync_func = None

    def loss(change):
        def step(data_iterator, model):
            output, loss_func = script.forward_step([], data_iterator, model)
            return output, lambda losses: change(*loss_func(losses))

        return step

    def two_batches(data_iterator, model):
        next(data_iterator)
        return script.forward_step([], data_iterator, model)

    def half(data_iterator, model):
        batch = next(data_iterator)
        return model(batch["tokens"][:, :1], batch["position_ids"][:, :1], None, labels=batch["labels"][:, :1]), None

    def without_first_column(batches):
        for batch in with_mask(batches):
            mask = batch["attention_mask"].clone()
            mask[0, 0, 3:, :3] = True
            yield {**batch, "attention_mask": mask}

    def attempt(name, max_tokens=CAP, config=(), **changes):
        data, chunk = script.batches(), changes.get("model", model)
        for key, value in config:
            setattr(chunk.config, key, value)
        call = {
            "forward_step_func": partial(script.forward_step, []),
            "data_iterator": data,
            "model": chunk,
            "num_microbatches": 2,
            "seq_length": 64,
            "micro_batch_size": 2,
        }
        with evenload.enabled(recipe_of(max_tokens, "off")):
            try:
                script.get_forward_backward_func()(**call | changes)
                told[name] = "no error"
            except EvenloadError as error:
                told[name] = str(error)
        for key, _ in config:
            setattr(chunk.config, key, {"calculate_per_token_loss": True}.get(key))

    averages = [("calculate_per_token_loss", False)]
    attempt("average", config=averages)
    attempt("mean of nothing", config=averages, forward_step_func=loss(lambda total, count, report: (total, report)))
    attempt("experts", config=[("num_moe_experts", 4), ("overlap_moe_expert_parallel_comm", True)])
    attempt("overlap", model=overlapped)
    attempt("no iterator", data_iterator=None)
    attempt("other keys", data_iterator=iter([{"input_ids": torch.ones(2, 4)}] * 2))
    attempt("no mapping", data_iterator=iter([torch.ones(2, 4)] * 2))
    attempt("mask", data_iterator=without_first_column(script.batches()))
    attempt("too long", max_tokens=4)
    attempt("mean", forward_step_func=loss(lambda total, count, report: (total / count, count, report)))
    attempt("two values", forward_step_func=loss(lambda total, count, report: (total / count, report)))
    attempt("padding counted", forward_step_func=loss(lambda total, count, report: (total, count + 1, report)))
    attempt("two batches", forward_step_func=two_batches)
    attempt("other tokens", forward_step_func=half)
    attempt("fine")
    return told


def test_a_loop_that_cannot_be_regrouped_exactly_is_told_why(world):
    (told,) = world(1).run(refusals)
    wanted = {
        "average": "no error",
        "mean of nothing": "something else than the mean",
        "experts": "overlap_moe_expert_parallel_comm True",
        "overlap": "config.no_sync_func = model.no_sync",
        "no iterator": "no rank of a copy of the model has a data iterator",
        "other keys": "keys input_ids",
        "no mapping": "gives Tensor",
        "mask": "not the causal one",
        "too long": "longer than plugins.packing.max_tokens",
        "mean": "returns the mean",
        "two values": "2 values",
        "padding counted": "counts other tokens",
        "two batches": "more than one batch",
        "other tokens": "does not give the model the batch",
        "fine": "no error",
    }
    assert told.keys() == wanted.keys()
    for name, part in wanted.items():
        assert part in told[name], f"{name}: {told[name]}"


def multiples() -> list[int]:
    """What packs are padded to, by settings of a config."""
    from types import SimpleNamespace

    from evenload.patches import bridge_cpu

    bridge_cpu()
    from evenload.integrations.megatron.unmodified.refusals.supported import tokens_multiple

    plain = {"tensor_model_parallel_size": 4, "sequence_parallel": False, "fp8": None, "fp4": None}
    plain |= {"fp8_recipe": "delayed", "fp4_recipe": "nvfp4"}
    shares = {"sequence_parallel": True}
    settings = [{}, shares, {"fp8": "hybrid"}, {"fp8": "e4m3", **shares}, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}]
    settings += [{"fp4": "e2m1"}, {"fp4": "e2m1", **shares}]
    return [tokens_multiple(SimpleNamespace(**{**plain, **one})) for one in settings]


def test_packs_are_padded_for_matrix_products_in_few_bits(world):
    (found,) = world(1).run(multiples)
    assert found == [1, 4, 16, 64, 32, 128, 512]


def rotary_errors() -> tuple[float, float]:
    """Error of the rotary embedding of a pack against sample by sample: as packed, and with a wrong max_seqlen."""
    import torch
    from evenload.patches import bridge_cpu

    bridge_cpu()
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    class Alone:
        size, rank = (lambda self: 1), (lambda self: 0)

    rope, worst_error, mutant = RotaryEmbedding(8, 1.0), 0.0, float("inf")
    for lengths in ([7], [1, 1], [5, 1], [1, 5], [3, 9, 2, 9]):
        borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        x = torch.randn(sum(lengths), 2, 8, dtype=torch.float64)

        def rotate(x, borders, longest):
            return _apply_rotary_pos_emb_thd(x, borders, rope(longest, packed_seq=True), cp_group=Alone())

        alone = torch.cat(
            [rotate(part, torch.tensor([0, len(part)]), len(part) + 3) for part in torch.split(x, lengths)]
        )
        worst_error = max(worst_error, float((rotate(x, borders, max(lengths)) - alone).abs().max()))
        if len(lengths) > 1 and max(lengths) > 1:
            mutant = min(mutant, float((rotate(x, borders, sum(lengths)) - alone).abs().max()))
    return worst_error, mutant


def test_rotary_positions_restart_at_every_sample(world):
    ((error, mutant),) = world(1).run(rotary_errors)
    assert error < 1e-15
    assert mutant > 1e-2
