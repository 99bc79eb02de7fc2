"""What the ranks of unmodified/test_script.py do: the script in one process, a little changed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import evenload
import torch
from evenload.integrations.megatron.unmodified.refusals.supported import tokens_multiple
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
        attempt("too long", max_tokens=4)
        attempt("two values", forward_step_func=loss(lambda total, count, report: (total / count, report)))
        attempt("padding counted", forward_step_func=loss(lambda total, count, report: (total, count + 1, report)))
        attempt("two batches", forward_step_func=two_batches)
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
