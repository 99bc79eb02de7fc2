"""trainer_script.py after what Unsloth does to Trainer when it loads a model: three methods are assigned anew.

Unsloth itself wants a GPU to be imported. Its patches are rebuilt from what they do (2026.10.9, models/_utils.py,
`patch_gradient_accumulation_fix`): `training_step` is written anew from its source, with two lines changed;
`get_batch_samples` is another function, which keeps the one before for models that it does not know;
`compute_loss` goes through a function of its own.
"""

import inspect
import sys
import textwrap
from pathlib import Path

import transformers.trainer
from transformers import AutoModelForCausalLM, Trainer

sys.path.append(str(Path(__file__).parent))
import trainer_script

load = AutoModelForCausalLM.from_pretrained


def load_and_patch(*words, **options):
    model = load(*words, **options)
    if Trainer.get_batch_samples.__name__ != "_unsloth_get_batch_samples":
        patch()
    return model.train()


def patch():
    stock, plain_loss = Trainer.get_batch_samples, Trainer.compute_loss

    def _unsloth_get_batch_samples(self, epoch_iterator, num_batches, device=None, *words, **options):
        if self.model.config.model_type == "gpt2":
            return stock(self, epoch_iterator, num_batches, device, *words, **options)
        batches = []
        for _ in range(num_batches):
            try:
                batches += [next(epoch_iterator)]
            except StopIteration:
                break
        counts = sum((batch["labels"][..., 1:] != -100).sum() for batch in batches)
        return batches, self.accelerator.gather(counts.to(device)).sum()

    def _unsloth_pre_compute_loss(self, model, inputs, *words, **options):
        return plain_loss(self, model, inputs, *words, **options)

    source = textwrap.dedent(inspect.getsource(Trainer.training_step))
    assert "model.train()" in source
    source = source.replace("def training_step", "def _unsloth_training_step", 1)
    source = source.replace("model.train()", "model.training or model.train()", 1)
    names = dict(vars(transformers.trainer))
    exec(source, names)
    Trainer.get_batch_samples = _unsloth_get_batch_samples
    Trainer.compute_loss = _unsloth_pre_compute_loss
    Trainer.training_step = names["_unsloth_training_step"]


if __name__ == "__main__":
    trainer_script.AutoModelForCausalLM.from_pretrained = load_and_patch
    trainer_script.main()
