"""A loss of its author's own that takes no short batches: run as `trainer_script.py` is."""

import runpy
from pathlib import Path
from typing import Any

from transformers import Trainer

own = Trainer.compute_loss


def of_windows(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss that looks at 16 tokens at once."""
    if inputs["input_ids"].shape[1] < 16:
        raise ValueError("batches of 16 tokens and more")
    return own(trainer, model, inputs, *args, **kwargs)


Trainer.compute_loss = of_windows
runpy.run_path(str(Path(__file__).with_name("trainer_script.py")), run_name="__main__")
