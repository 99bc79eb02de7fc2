"""What the ranks of unmodified/test_script.py do: the script in one process, a little changed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import evenload
import torch
from evenload.integrations.megatron.unmodified.refusals.supported import tokens_multiple
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron_tests.telling import told
from megatron_tests.user_jobs import loaded_script, recipe, worst

CAP = 128
CALL = {"num_microbatches": 2, "seq_length": 64, "micro_batch_size": 2}


def packed(max_tokens: int = CAP, slices: str = "even") -> Any:
    return recipe(packing={"enabled": True, "max_tokens": max_tokens, "slices": slices})


def with_mask(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        size = batch["tokens"].shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).triu(1)
        yield {**batch, "attention_mask": mask.expand(len(batch["tokens"]), 1, size, size)}


def other_losses(world: Any, *, max_tokens: int) -> dict[str, float]:
    """Gradient errors of planned against stock steps, for scripts that differ a little."""
    told = {}
    with loaded_script("megatron_script") as script:

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
            with evenload.enabled(packed(max_tokens)):
                planned = script.train(torch.float64, positions, False)
            computed = [sum(rows * tokens for rows, tokens in result["shapes"]) for result in (planned, stock)]
            assert computed[0] < computed[1]
            told[name] = worst(planned, stock)
    return told


def identities(world: Any) -> dict[str, Any]:
    """What a loop holds before, during and after a session, and what a held function does then."""
    with loaded_script("megatron_script") as script:
        held_before = {
            "schedule": schedules.get_forward_backward_func,
            "alias": script.get_forward_backward_func,
            "attention": vars(DotProductAttention)["forward"],
        }
        session = evenload.enable(packed(CAP))
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
            **CALL,
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


def told_of_scripts(world: Any) -> dict[str, str]:
    """What each kind of unsupported loop is told."""
    said: dict[str, str] = {}
    with loaded_script("megatron_script") as script:
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
            return model(
                batch["tokens"][:, :1], batch["position_ids"][:, :1], None, labels=batch["labels"][:, :1]
            ), None

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
                **CALL,
            }
            planned = evenload.enabled(packed(max_tokens, "off"))
            said[name] = told(lambda: script.get_forward_backward_func()(**call | changes), planned)
            for key, _ in config:
                setattr(chunk.config, key, {"calculate_per_token_loss": True}.get(key))

        averages = [("calculate_per_token_loss", False)]
        attempt("average", config=averages)
        attempt(
            "mean of nothing", config=averages, forward_step_func=loss(lambda total, count, report: (total, report))
        )
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
    return said


def multiples(world: Any) -> list[int]:
    """What packs are padded to, by settings of a config."""
    plain = {"tensor_model_parallel_size": 4, "sequence_parallel": False, "fp8": None, "fp4": None}
    plain |= {"fp8_recipe": "delayed", "fp4_recipe": "nvfp4"}
    shares = {"sequence_parallel": True}
    settings = [{}, shares, {"fp8": "hybrid"}, {"fp8": "e4m3", **shares}, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}]
    settings += [{"fp4": "e2m1"}, {"fp4": "e2m1", **shares}]
    return [tokens_multiple(SimpleNamespace(**{**plain, **one})) for one in settings]


def rotary_errors(world: Any) -> tuple[float, float]:
    """Error of the rotary embedding of a pack against sample by sample: as packed, and with a wrong max_seqlen."""

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
