"""evenload inside the trainers: plans bound to their own extension points."""

if __name__ != "evenload.integrations":
    raise ImportError(
        f"{__name__}: import this package as evenload.integrations; a second copy would mean a second registry"
    )

from ..core.recipe.pretrained import register_model
from ..core.recipe.traits import TRAINERS
from .deepspeed.engine.traits import DEEPSPEED
from .huggingface.examples import TINY_LLAMA
from .megatron.base.traits import MEGATRON
from .transformers.traits import TRANSFORMERS

TRAINERS.update(megatron=MEGATRON, deepspeed=DEEPSPEED, transformers=TRANSFORMERS)
register_model("tiny-llama", TINY_LLAMA)
