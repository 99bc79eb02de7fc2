"""The sections of a recipe. Every field's docstring says what it does; `recipe` puts them together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from ..input import bounds
from ..input.reading import file_name
from ..input.validation import Frozen, OneOf
from .families import FAMILIES, Family
from .generated import CollectRule, DraftRule, ScoredSamples
from .shares import POLICIES

FilePath = Annotated[Path, AfterValidator(file_name)]


class Section(Frozen):
    model_config = ConfigDict(validate_default=True)


class Experts(Section):
    """The experts of a model (Shazeer et al., arXiv 1701.06538) and how tokens are routed to them."""

    num_experts: bounds.Size = 8
    """Of each layer that has any."""
    topk: bounds.Size = 2
    """Experts of a token in each of these layers."""
    ffn_hidden_size: bounds.Size | None = None
    """Of one expert; null means model.ffn_hidden_size."""
    shared_ffn_hidden_size: bounds.SizeOrNone = 0
    """Of the shared expert, which every token takes; 0: none."""
    every: bounds.LayerCount = 1
    """Of so many layers the first has experts, the others are dense (Megatron's moe_layer_freq)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """softmax: over the chosen experts. sigmoid: of each expert, over the sum of the chosen ones."""
    bias_rate: bounds.AmountOrNone = 0.0
    """By how much a step moves the bias of an expert that has less than the mean load (Wang et al., arXiv 2408.15664);
    0: no bias."""
    z_loss: bounds.AmountOrNone = 0.0
    """Coefficient of the router's z-loss (Zoph et al., arXiv 2202.08906, section 3.1)."""
    sequence_aux_loss: bounds.AmountOrNone = 0.0
    """Coefficient of the balance loss of each sequence (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    batch_aux_loss: bounds.AmountOrNone = 0.0
    """Coefficient of the balance loss of each micro-batch (Fedus et al., arXiv 2101.03961, section 2.2). It depends on
    which samples are in a micro-batch, so it excludes plugins that regroup them."""
    capacity_factor: bounds.AmountOrNone = 0.0
    """An expert drops what is over this many times the mean load of a micro-batch; 0: nothing is dropped. Regrouping
    would drop other tokens, so it excludes plugins that regroup."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How Megatron-Core moves tokens to experts; allgather demands equally many tokens on all ranks of a group."""


class Model(Section):
    """The transformer to build. Names are Megatron's."""

    family: Annotated[str, OneOf(FAMILIES)] = "llama"
    """llama: RMSNorm, SwiGLU, no biases. gpt: LayerNorm, GELU, biases. mixtral, qwen3_moe: llama, qwen3 with experts.
    All use rotary positions."""
    num_layers: bounds.LayerCount = 4
    """Of the whole model."""
    hidden_size: bounds.Size = 256
    """Width of the residual stream."""
    num_attention_heads: bounds.Size = 8
    """Query heads."""
    num_query_groups: bounds.Size | None = None
    """Key-value heads (GQA); null means one per attention head."""
    head_dim: bounds.Size | None = None
    """Values of one head; null means hidden_size / num_attention_heads."""
    ffn_hidden_size: bounds.Size | None = None
    """Null means 4x hidden (gpt) or 8/3x hidden rounded up to 64 (the gated families)."""
    vocab_size: bounds.Size | None = None
    """Null means the data's, rounded up to a multiple of 128 and of tp."""
    rotary_base: bounds.Amount = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling_factor: bounds.Amount | None = None
    """Llama 3's scaling of rotary frequencies by this factor (its low and high factors 1 and 4, of 8192 positions);
    null: none."""
    norm_epsilon: bounds.Amount | None = None
    """What norms add to the variance; null means 1e-5 under Megatron-Core, the family's own under Transformers."""
    tied_embeddings: bool = False
    """The output layer multiplies by the embedding's weights, and has none of its own."""
    moe: Experts | None = None
    """The experts of the families mixtral and qwen3_moe; null: a dense model."""
    config: FilePath | None = None
    """A Hugging Face config.json to build instead (trainer: deepspeed); the fields above are then ignored."""
    weights: FilePath | None = None
    """A Hugging Face folder (config.json, safetensors) whose weights training starts from, or tiny-llama, which
    evenload makes. The fields above are then read from its config.json, and may be left out; null: weights are drawn
    from train.seed."""

    @property
    def kind(self) -> Family:
        """What the model's family is like."""
        return FAMILIES[self.family]

    @property
    def expert_ffn_size(self) -> int:
        """Hidden size of one expert; 0 in a dense model."""
        return (self.moe.ffn_hidden_size or self.ffn_size) if self.moe else 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts, from 0."""
        return tuple(range(0, self.num_layers, self.moe.every)) if self.moe else ()

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Values of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return -(-8 * self.hidden_size // 3 // 64) * 64 if self.kind.gated else 4 * self.hidden_size


class Domain(Section):
    """Samples of one kind, in an order of their own."""

    source: str
    """As data.source; the other settings of data hold for it, too."""
    share: bounds.AmountOrNone = 1.0
    """The part of what is drawn that comes from this domain, relative to the other domains' shares; 0: none."""
    weight: bounds.Amount = 1.0
    """The weight of each of its samples in the loss."""


class SharesAtStep(Section):
    """A point that a schedule of shares leads through."""

    step: bounds.CountOrNone
    """Steps before it."""
    shares: dict[str, bounds.AmountOrNone]
    """By domain; one that is left out has its own share."""


class Mix(Section):
    """How much is drawn of each domain."""

    policy: Annotated[str, OneOf(POLICIES)] = "static"
    """static: the share of each domain. schedule: from point to point in a straight line, step by step."""
    unit: Literal["samples", "targets"] = "samples"
    """What shares are of: samples, or tokens that carry loss."""
    points: tuple[SharesAtStep, ...] = ()
    """Points of a schedule, by ascending steps. Before the first one its shares hold, after the last one those."""


class Validation(Section):
    """Samples that are scored and never trained on."""

    source: str | None = None
    """As data.source; the other settings of data hold for it, too."""
    domains: dict[str, str] | None = None
    """Instead of source: several sources by name. The loss of each is reported next to that of all."""
    every: bounds.Count = 100
    """Steps of training between two evaluations; there is one before the first step and one after the last, too."""
    batches: bounds.Count | None = None
    """So many times train.global_batch_size of its samples, the same ones each time; null: all of them."""
    generate: ScoredSamples | None = None
    """Prompts whose samples are scored, too; null: none."""


class Data(Section):
    """Where samples come from and how their text becomes tokens."""

    source: str = "python-stdlib"
    """python-stdlib, python-docstrings (and python-docstrings-held-out; of one package: python-docstrings/asyncio), a
    .jsonl file, a Megatron .bin/.idx prefix, or a Hugging Face dataset on disk (arrow, parquet)."""
    domains: dict[str, Domain] | None = None
    """Instead of source: a mixture of several by name, each with its share (docs/data.md)."""
    mix: Mix = Mix()
    """In what shares the domains are drawn."""
    tokenizer: str = "bytes"
    """bytes, the path of a `tokenizers` JSON file, or a Hugging Face folder. With model.weights, bytes stands for the
    tokenizer of that folder where it has one."""
    text_key: str = "text"
    """Field of text, token ids or messages; text stands for whatever the rows hold."""
    append_eos: bool | None = None
    """Whether the tokenizer's end of sequence is appended to texts; null: to completions only."""
    loss_on: Literal["completion", "all"] = "completion"
    """Tokens of prompts and chats that are targets: completions and what the assistant says, or all."""
    max_length: bounds.SampleLength = 8192
    """Tokens of the longest sample that is kept whole."""
    long_samples: Literal["split", "truncate", "drop"] = "split"
    """What happens to longer ones; the count is reported."""
    min_length: bounds.SampleLength = 2
    """Tokens of the shortest sample that is kept."""
    group: str | None = None
    """Field of an integer or a string: rows of one value are a group, whose samples are in one global batch and stay
    together as plugins.packing.groups_in says. Null: each sample is by itself."""
    weight_column: str | None = None
    """Field of the weights of targets in the loss: a number a row, or a list of one for each target token, of any sign.
    Tokens of weight 0 carry no loss. Null: each weight is 1, as in data.validation."""
    weight_divisor: Literal["tokens", "sequences"] | bounds.Amount | None = None
    """What weighted losses are divided by, so that weights may add up to 0: tokens that carry loss or sequences, of
    weight 0 too, or a number. Null: what the weights add up to."""
    validation: Validation | None = None
    """What `train` evaluates now and then; null: nothing."""

    @property
    def domain_sources(self) -> dict[str, str] | None:
        """The source of every domain by name; None where there is one source."""
        return None if self.domains is None else {name: domain.source for name, domain in self.domains.items()}


class Replica(Section):
    """One replica of the model: its own degrees of parallelism, and where it runs (LobRA, arXiv 2509.01193)."""

    tp: bounds.SharerCount = 1
    """As parallel.tp."""
    pp: bounds.StageCount = 1
    """As parallel.pp."""
    layers: tuple[bounds.LayerCount, ...] | Literal["auto"] | None = None
    """As parallel.layers."""
    dp: bounds.RankCount = 1
    """As parallel.dp, which has to be said here."""
    cluster: str | None = None
    """As cluster, where its machines are others than the recipe's."""
    costs: str | None = None
    """As costs, where its machines are others than the recipe's."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """As deepspeed.zero_stage, where it is another than the recipe's."""

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp


class Parallel(Section):
    """Degrees of parallelism; dp null takes what the number of processes leaves."""

    tp: bounds.SharerCount = 1
    """Ranks that share each layer's matrices."""
    pp: bounds.StageCount = 1
    """Devices that the layers are divided among, in order."""
    layers: tuple[bounds.LayerCount, ...] | Literal["auto"] | None = None
    """Layers of each of the pp stages, in order. auto: numbers of least step, as the output layer is the last stage's.
    Null: equally many."""
    cp: bounds.SharerCount = 1
    """Ranks that share every sequence."""
    ep: bounds.RankCount = 1
    """Ranks that the experts of a layer are divided among."""
    dp: bounds.RankCount | None = None
    """Ranks, or groups of cp, that have samples of their own."""
    replicas: tuple[Replica, ...] | None = None
    """Instead of all others: replicas that may be of unlike shapes and on unlike machines, in the order of their ranks.
    Each gets the sequences with which all end together. For adapters of tenants (plugins.lora), and for whole models
    on Megatron, whose gradients are summed over the replicas: all hold the same weights, to the bit."""


class Updates(Section):
    """How Adam moves weights (Loshchilov and Hutter, arXiv 1711.05101), and its learning rate from step to step."""

    lr: bounds.Amount = 1e-3
    """The highest learning rate."""
    min_lr: bounds.AmountOrNone = 0.0
    """What lr_schedule ends at."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up."""
    warmup_steps: bounds.CountOrNone = 0
    """Steps in which the rate rises linearly."""
    weight_decay: bounds.AmountOrNone = 0.0
    """Of matrices alone: norms and biases are not decayed."""
    betas: tuple[bounds.Beta, bounds.Beta] = (0.9, 0.999)
    """Of Adam's first and second moment."""
    eps: bounds.Amount = 1e-8
    """What Adam adds to the root of the second moment."""
    clip_grad: bounds.AmountOrNone = 1.0
    """Norm to which a larger gradient is scaled; 0 switches clipping off."""


class Train(Updates):
    steps: bounds.Count = 20
    """Null leaves it out, so that max_tokens or epochs may stand in its place."""
    max_tokens: bounds.TokenCount | None = None
    """Instead of steps: as many as draw so many tokens; the last one reaches them."""
    epochs: bounds.Count | None = None
    """Instead of steps: as many as draw each sample so many times; the last one of an epoch takes what is left."""
    max_minutes: bounds.Amount | None = None
    """The run ends early, with a checkpoint and exit code 75, once another step might not end within this many minutes
    of the command's start; the same command resumes it. Null: no limit."""
    gc_every: bounds.Count | None = None
    """Collect Python's garbage after every so many steps, on all ranks at once, and never inside a step. Null: Python
    collects on each rank by itself when it has made enough objects, and the other ranks wait."""
    global_batch_size: bounds.SequenceCount = 64
    """Samples per optimizer step, over all ranks; null leaves it out."""
    global_batch_tokens: bounds.TokenCount | None = None
    """Instead of global_batch_size: a step takes samples in their order until their tokens reach it."""
    micro_batch_size: bounds.SequenceCount = 1
    """Samples per micro-batch of the stock plan, padded to the longest of them (no plugin enabled)."""
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Of weights and activations in passes; fp64 is for proofs."""
    recompute: bool = False
    """Keep only the inputs of layers for the backward pass and compute the rest again (activation checkpointing)."""
    seed: bounds.Seed = 1234
    """Of weights and of the order of samples."""
    freeze: tuple[str, ...] = ()
    """Patterns as a shell has them of names of parameters that keep their values, as the trainer names them: Hugging
    Face's names under deepspeed, Megatron-Core's with layers of the whole model under megatron."""

    export: FilePath | None = None
    """After the last step, write the model into this folder as Transformers reads it (config.json, safetensors, the
    files of the tokenizer); it must not be there, or be empty."""
    export_prompts: bounds.CountOrNone = 0
    """Prompts of the validation data, or of the data, whose next token by the trainer is compared with that by
    Transformers from the exported folder, which rank 0 then opens whole; 0: none."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, values: Any) -> Any:
        """A recipe that says ``steps`` can be overridden by one that says ``epochs``."""
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in REPLACED}


REPLACED = {"steps": ("max_tokens", "epochs"), "global_batch_size": ("global_batch_tokens",)}
"""Keys of ``train`` by those that may stand in their place."""


class Checkpoint(Section):
    dir: FilePath | None = None
    """Null saves nothing."""
    every: bounds.Count = 50
    """Steps from one checkpoint to the next."""
    keep: bounds.Count = 2
    """The last so many stay."""
    background: bool = False
    """Copy a checkpoint when it is due and write it while training goes on (trainer: megatron)."""
    resume: bool = True
    """Continue from the last good checkpoint in ``dir`` if there is one."""
    best: bool | str = False
    """Keep, in the folder ``best`` next to the last ones, the checkpoint of the lowest validation loss: true, of all
    targets; a name of data.validation.domains, of that domain; or of the highest figure of data.validation.generate:
    generate.score, generate.pass_at_K, generate.maj_at_K."""
    verify: bool = True
    """Compare the hash of every file of a checkpoint before it is loaded; false compares sizes alone."""
    trust: bool = False
    """Load checkpoint files that hold more than tensors and plain data, which may run code: only where you know who
    wrote them."""


class Log(Section):
    tensorboard: FilePath | None = None
    """Folder for TensorBoard scalars under ``evenload/``."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the same scalars, where the package is installed."""
    every: bounds.Count = 1
    """Steps from one row of tensorboard and wandb to the next."""
    trace: FilePath | None = None
    """Chrome trace (JSON) of the first steps after the warm-up, measured next to predicted; ``--trace`` sets it."""
    trace_steps: bounds.Count = 4
    """How many steps it holds."""
    loads: FilePath | None = None
    """File that gets, of every step, how many tokens of each rank the routers sent to each expert, layer by layer."""
    jsonl: FilePath | None = None
    """File that gets one JSON object a step, with the numbers of the step's samples."""


class Planner(Section):
    budget_ms: bounds.Milliseconds | None = None
    """How long a step may wait for its plan before the best simpler one that is there takes over; null: 5 % of the step
    that is predicted, and what earlier steps left of theirs."""
    background: bool = True
    """Plan ahead in a thread; false plans in line (for debugging)."""
    steps_ahead: Annotated[int, Field(ge=1, le=64)] | None = None
    """How many steps ahead plans are begun; of large batches the ranks of a node take turns, so each has as many steps'
    time for its plan. null: as many as a node has ranks, at most 8, and 2 where a rank is alone on its node. It is 1
    where plans depend on the steps before: with planner.refit, loads of experts, tenants."""
    refit: bool = False
    """Fit the cost model to the measured steps while training, so that plans follow the hardware."""


class Safety(Section):
    stuck_s: bounds.Seconds = 300.0
    """A job in which no rank makes progress for this long is ended with one message that names the rank."""
    gone_s: bounds.Seconds = 15.0
    """A rank whose heartbeat stops for this long is taken for dead."""
    collective_timeout_s: bounds.Seconds = 1800.0
    """After which torch itself gives a collective up."""


class Megatron(Section):
    distributed_optimizer: bool = True
    """Each data-parallel rank keeps its part of the optimizer's state."""
    overlap_grad_reduce: bool = False
    """Sum gradients while the backward passes still run."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks divide the tokens where they hold them all otherwise: at norms, residuals and routers."""


class DeepSpeed(Section):
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ranks divide: 1 optimizer states, 2 gradients too, 3 weights too."""
    config: dict[str, Any] = Field(default={})
    """Further ds_config keys; what evenload must own (batch sizes, precision, clipping) is refused here."""


SPARSE_BLOCKS = 512, 64
"""Queries and keys of a block of sparse attention."""


class Sparse(Section):
    """Attention that leaves blocks of keys out where losses are computed and nothing is trained: in validations,
    `evenload score`, plugins.data.select and weight. Gradients and generation have all keys, always."""

    choose: Literal["dense", "sample", "estimate", "kept"] = "dense"
    """dense: leave nothing out. sample: by some queries (SampleAttention, arXiv 2406.15486). estimate: by products of 4
    bits (SALE, arXiv 2505.24179). kept: by an earlier dense pass of the same sample (AdaSpa, arXiv 2502.21079)."""
    mass: Annotated[float, Field(gt=0, le=1)] = 0.95
    """The share of the softmax that kept blocks shall have; 1 is dense."""
    min_length: bounds.SampleLength = 16384
    """Tokens of the shortest sample that leaves blocks out."""
    dense_share: Annotated[float, Field(gt=0, le=1)] = 0.05
    """The share of these samples, drawn by hash, that are scored densely as well: they correct the loss and say what it
    is off by."""
    limit: bounds.AmountOrNone = 0.002
    """Relative error of a drawn sample's loss above which the pass is repeated densely."""
    state_bytes: bounds.TokenCount | None = None
    """Bytes of a rank that blocks of ``kept`` may take; samples beyond it are dense. Null: what they need."""

    @property
    def is_on(self) -> bool:
        """Whether anything may be left out."""
        return self.choose != "dense" and self.mass < 1


class Generate(Section):
    """How `evenload generate` draws samples, and when they end; `train.seed` is that of the draws."""

    max_new_tokens: bounds.Count = 256
    """Tokens of a sample at most, where its prompt does not say it."""
    temperature: bounds.AmountOrNone = 1.0
    """Divides logits; 0: the most probable token is taken."""
    top_k: bounds.CountOrNone = 0
    """Draw from so many of the most probable tokens; 0: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from as few of the most probable tokens as have this much probability together."""
    end_tokens: tuple[bounds.CountOrNone, ...] | None = None
    """Token ids that end a sample; null: the tokenizer's end of sequence; []: none does."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...] = ()
    """Text that ends a sample, and is left out of its text."""
    slots: bounds.SequenceCount = 64
    """Samples that a rank has under way at once."""
    cache_tokens: bounds.TokenCount | None = None
    """Tokens whose keys and values a rank holds at once. Samples that do not fit any more begin again later, with the
    tokens that they have. null: those of all samples under way."""
    keys: Literal["int8", "int4"] | None = None
    """Round keys and values, by token and head, so that more samples fit: an approximation. null: keep them."""
    move_every: bounds.CountOrNone | None = None
    """Decode steps of a mean rank after which samples under way are dealt to the ranks again, where that ends them
    earlier; 0: never, null: by what `costs` says of decode steps, and never where it says nothing."""
    collect: CollectRule | None = None
    """Keep some of the samples of each prompt, those that end first; null: all are kept."""
    drafts: DraftRule | None = None
    """Guess tokens, so that a forward gives several of a sample, the same ones; null: one."""
