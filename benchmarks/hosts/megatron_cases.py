"""Megatron-LM's own scripts on CPU ranks: each class of its recipes once, on a tiny model.

What upstream needs where there is no CUDA, no Triton and no compiler is in tests/hosts/startup/megatron_lm.py: stock
runs and runs with plugins have the same.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from cases import Arguments, Case

NUMBER = r"([-+.\dEe]+|nan)"
PRINTED = {
    "loss": re.compile(rf"iteration +(\d+)/.*? lm loss: {NUMBER}"),
    "grad_norm": re.compile(rf"iteration +(\d+)/.*? grad norm: {NUMBER}"),
    "eval_loss": re.compile(rf"validation loss at iteration (\d+) \| lm loss value: {NUMBER}"),
}
"""What rank 0 of the last stage prints, by step."""
SIMPLE = {
    "loss": re.compile(rf"Iteration (\d+): Losses reduced: .*?tensor\({NUMBER}"),
    "grad_norm": re.compile(r"(?!)"),
    "eval_loss": re.compile(r"(?!)"),
}
BASE = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 12 --train-iters 10 --lr 1e-3 --lr-decay-style constant --min-lr 1e-3
    --tokenizer-type NullTokenizer --vocab-size 127 --mock-data --split 99,1,0 --num-workers 0
    --transformer-impl local --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --distributed-backend gloo --log-interval 1 --eval-iters 0 --eval-interval 1000
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-rope-fusion --no-persist-layer-norm --use-cpu-initialization"""
"""Two layers, packs of three samples where stock's micro-batches have two."""
STOCK = "trainer: megatron\n"
PACKING = STOCK + "plugins:\n  packing: {enabled: true, max_tokens: 192}\n"
EXPERTS = """--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --disable-bias-linear"""
BALANCED = f"{EXPERTS} --moe-aux-loss-coeff 1e-2"
BY_SEQUENCE = f"{BALANCED} --moe-router-load-balancing-type seq_aux_loss"
MODERN = """--group-query-attention --num-query-groups 2 --swiglu --qk-layernorm --disable-bias-linear
    --normalization RMSNorm --untie-embeddings-and-output-weights"""
MESH = STOCK + "plugins:\n  mesh: {enabled: true, max_tokens: 40}\n"
TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"


UNEQUAL = f"{PP} 2 --num-layers 3 --decoder-first-pipeline-num-layers 2"
ORDERED = STOCK + "plugins:\n  packing: {enabled: true, max_tokens: 192}\n  pipeline: {enabled: true}\n"


def arguments(flags: str) -> Arguments:
    """Of `pretrain_gpt.py` with these flags after the base ones."""
    return lambda folder, layout: [*BASE.split(), *flags.split()]


def case(note: str, layout: str, flags: str = "", ranks: int = 2, recipe: str = PACKING, exact: bool = True) -> Case:
    """A class of recipes. ``exact``: its gradients in float64 lie whole on each rank, and can be compared."""
    return Case(
        checkout="Megatron-LM",
        path="pretrain_gpt.py",
        layouts=(layout,),
        arguments=arguments(flags),
        trainer="megatron",
        note=note,
        ranks=ranks,
        recipes=(STOCK, recipe),
        printed=PRINTED,
        exact=exact,
    )


def refused(note: str, flags: str = "", recipe: str = PACKING) -> Case:
    """A run of which the message counts."""
    return replace(case(f"refused: {note}", "2 ranks", flags, recipe=recipe), has_stock=False)


def _nothing(folder: Path, layout: str) -> list[str]:
    return []


SIMPLE_LOOP = Case(
    checkout="Megatron-LM",
    path="examples/run_simple_mcore_train_loop.py",
    layouts=("tp2",),
    arguments=_nothing,
    trainer="megatron",
    recipes=(STOCK, PACKING),
    printed=SIMPLE,
)
SHORT = STOCK + "plugins:\n  packing: {enabled: true, max_tokens: 32, slices: off}\n"
REFUSED = (
    refused("the loader's mask is not causal", "--eod-mask-loss --reset-position-ids --reset-attention-mask"),
    refused("an expert's capacity", f"{BALANCED} --moe-expert-capacity-factor 1.0"),
    refused("jitter of routers", f"{BALANCED} --moe-input-jitter-eps 0.01"),
    refused("Sinkhorn's balance", f"{EXPERTS} --moe-router-load-balancing-type sinkhorn"),
    refused("multi-token prediction with experts", f"{BY_SEQUENCE} --mtp-num-layers 1"),
    refused("no sample fits", recipe=SHORT),
    refused("nothing is trained", "--skip-train --eval-iters 2"),
    refused("no plugin", recipe=STOCK),
    refused("stages of unequal layers under an order", UNEQUAL, recipe=ORDERED),
)
"""What cannot gain, or is refused: an exit code and one message before the first update."""
CASES = (
    case("default flags", "dp2"),
    case("loss per token", "dp2", "--calculate-per-token-loss"),
    case("tensor parallel", "tp2", f"{TP} 2"),
    case("sequence parallel", "tp2", f"{TP} 2 --sequence-parallel"),
    case("two stages", "pp2", f"{PP} 2"),
    case("four stages", "pp4", f"{PP} 4 --num-layers 4", ranks=4),
    case("tensor parallel stages", "tp2 pp2", f"{TP} 2 {PP} 2", ranks=4),
    case("virtual stages", "pp2", f"{PP} 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    case("experts, loss by sequence", "ep2", BY_SEQUENCE),
    case("experts, auxiliary loss", "ep2", BALANCED),
    case("experts, no loss of routers", "ep2", f"{EXPERTS} --moe-router-load-balancing-type none"),
    case(
        "distributed optimizer, overlap",
        "dp2",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        exact=False,
    ),
    case("evaluation", "dp2", "--eval-iters 2 --eval-interval 5"),
    case("full recompute", "dp2", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    case("selective recompute", "dp2", "--recompute-granularity selective"),
    case("resets at documents", "dp2", "--eod-mask-loss --reset-position-ids --reset-attention-mask"),
    case("GQA, SwiGLU, RMSNorm, q and k norms", "dp2", MODERN),
    case("stages of unequal layers", "pp2", UNEQUAL),
    case("learned positions", "dp2", "--position-embedding-type learned_absolute"),
    case("multi-token prediction", "dp2", "--mtp-num-layers 1"),
    case("sliding window", "dp2", "--window-size 16,0"),
    case("mesh, every sample over the cap", "dp2", recipe=MESH),
    SIMPLE_LOOP,
    *REFUSED,
)
