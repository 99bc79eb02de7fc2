"""What a model's call is given: entries of a batch that nobody reads are left out, others stay."""

from __future__ import annotations

from typing import Any

import pytest
from harness.lazy import LazyModule

peft, transformers = LazyModule("peft"), LazyModule("transformers")
inputs = LazyModule("evenload.integrations.huggingface.inputs")

pytestmark = pytest.mark.slow  # builds models

READ = {"input_ids": 1, "labels": 2, "attention_mask": 3}


class Weighs:
    def compute_loss(self, inputs: Any) -> Any:
        return inputs["row_weights"]


def _llama() -> Any:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **shape))


@pytest.mark.parametrize("adapted", [False, True])
def test_entries_are_left_out_where_no_code_of_the_model_names_them(adapted: bool) -> None:
    model = _llama()
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    extra = {"sample_ids": 4, "row_weights": 5}
    assert inputs.without_unread({**READ, **extra}, model) == READ
    # An argument of the loss function, of attention, and of a Trainer.
    read = {"source": 4, "softcap": 5, "row_weights": 6}
    assert inputs.without_unread({**READ, **read}, model, Weighs) == {**READ, **read}


def test_a_model_that_takes_no_other_arguments_is_given_them_and_fails_as_ever() -> None:
    model = _llama()

    class Narrow(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            return input_ids

    model.__class__ = Narrow
    assert inputs.without_unread({**READ, "sample_ids": 4}, model) == {**READ, "sample_ids": 4}
