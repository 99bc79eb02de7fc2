"""The sections of a recipe. Every field's docstring says what it does; `recipe` puts them together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from ..input import bounds
from ..input.reading import file_name
from ..input.validation import Frozen

FilePath = Annotated[Path, AfterValidator(file_name)]


class Section(Frozen):
    model_config = ConfigDict(validate_default=True)


class Model(Section):
    """The transformer to build. Names are Megatron's."""

    family: Literal["llama", "gpt", "qwen2", "qwen3"] = "llama"
    """llama: RMSNorm, SwiGLU, no biases. gpt: LayerNorm, GELU, biases. All use rotary positions."""
    num_layers: bounds.LayerCount = 4
    hidden_size: bounds.Size = 256
    num_attention_heads: bounds.Size = 8
    num_query_groups: bounds.Size | None = None
    """Key-value heads (GQA); null means one per attention head."""
    ffn_hidden_size: bounds.Size | None = None
    """Null means 4x hidden (gpt) or 8/3x hidden rounded up to 64 (the gated families)."""
    vocab_size: bounds.Size | None = None
    """Null means the data's, rounded up to a multiple of 128 and of tp."""
    rotary_base: bounds.Amount = 10000.0
    config: FilePath | None = None
    """A Hugging Face config.json to build instead (trainer: deepspeed); the fields above are then ignored."""

    @property
    def gated(self) -> bool:
        return self.family != "gpt"

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return -(-8 * self.hidden_size // 3 // 64) * 64 if self.gated else 4 * self.hidden_size


class Data(Section):
    """Where samples come from."""

    source: str = "python-stdlib"
    """python-stdlib, a .jsonl file, a Megatron .bin/.idx prefix, or a Hugging Face dataset on disk (arrow, parquet)."""
    tokenizer: str = "bytes"
    """bytes, or the path of a `tokenizers` JSON file."""
    text_key: str = "text"
    max_length: bounds.SampleLength = 8192
    """Tokens of the longest sample that is kept whole."""
    long_samples: Literal["split", "truncate", "drop"] = "split"
    """What happens to longer ones; the count is reported."""
    min_length: bounds.SampleLength = 2


class Parallel(Section):
    """Degrees of parallelism; dp null takes what the number of processes leaves."""

    tp: bounds.SharerCount = 1
    pp: bounds.StageCount = 1
    cp: bounds.SharerCount = 1
    ep: bounds.RankCount = 1
    dp: bounds.RankCount | None = None


class Train(Section):
    steps: bounds.Count = 20
    global_batch_size: bounds.SequenceCount = 64
    """Samples per optimizer step, over all ranks."""
    micro_batch_size: bounds.SequenceCount = 1
    """Samples per micro-batch of the stock plan, padded to the longest of them (no plugin enabled)."""
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    recompute: bool = False
    """Keep only the inputs of layers for the backward pass and compute the rest again (activation checkpointing)."""
    seed: bounds.Seed = 1234
    lr: bounds.Amount = 1e-3
    min_lr: bounds.AmountOrNone = 0.0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: bounds.CountOrNone = 0
    weight_decay: bounds.AmountOrNone = 0.0
    clip_grad: bounds.AmountOrNone = 1.0
    """Global gradient norm; 0 switches clipping off."""


class Checkpoint(Section):
    dir: FilePath | None = None
    """Null saves nothing."""
    every: bounds.Count = 50
    keep: bounds.Count = 2
    resume: bool = True
    """Continue from the last good checkpoint in ``dir`` if there is one."""
    verify: bool = True
    """Compare the hash of every file of a checkpoint before it is loaded; false compares sizes alone."""
    trust: bool = False
    """Load checkpoint files that hold more than tensors and plain data, which may run code: only where you know who
    wrote them."""


class Log(Section):
    tensorboard: FilePath | None = None
    """Folder for TensorBoard scalars under ``evenload/``."""
    every: bounds.Count = 1
    trace: FilePath | None = None
    """Chrome trace (JSON) of the first steps after the warm-up, measured beside predicted; ``--trace`` sets it."""
    trace_steps: bounds.Count = 4
    """How many steps it holds."""
    jsonl: FilePath | None = None
    """File that gets one JSON object a step, with the numbers of the step's samples."""


class Planner(Section):
    budget_ms: bounds.Milliseconds = 2000.0
    """How long a step may wait for its plan before the next simpler planner takes over."""
    background: bool = True
    """Plan one step ahead in a thread; false plans in line (for debugging)."""
    refit: bool = False
    """Fit the cost model to the measured steps while training, so that plans follow the hardware."""


class Safety(Section):
    stuck_s: bounds.Seconds = 300.0
    """A job in which no rank makes progress for this long is ended with one message that names the rank."""
    gone_s: bounds.Seconds = 15.0
    """A rank whose heartbeat stops for this long is taken for dead."""
    collective_timeout_s: bounds.Seconds = 1800.0


class Megatron(Section):
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False


class DeepSpeed(Section):
    zero_stage: Literal[0, 1, 2, 3] = 1
    config: dict[str, Any] = Field(default={})
    """Further ds_config keys; what evenload must own (batch sizes, precision, clipping) is refused here."""
