"""Forecasts of ragged batches, which pictures show."""

import numpy as np
from evenload.api import load_recipe
from evenload.training.forecast.forecast import look_ahead

RECIPE = """
model: {num_layers: 8}
parallel: {dp: 4}
train: {global_batch_size: 48, micro_batch_size: 2}
data: {max_length: 2048}
plugins: {packing: {enabled: true, max_tokens: 4096}}
"""

LAYOUTS = {
    "dp": [],
    "pp": ["parallel.pp=4"],
    "cp": ["parallel.cp=2"],
    "stock": ["plugins.packing.enabled=false"],
    "recompute": ["train.recompute=true"],
    "zero3": ["trainer=deepspeed", "deepspeed.zero_stage=3"],
}


def forecast_in(folder, layout="dp", steps=1):
    """The forecast of a layout; ``folder``: gets the recipe and its lengths."""
    (folder / "recipe.yaml").write_text(RECIPE)
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 2000).astype(int) + 1
    (folder / "lengths.txt").write_text("\n".join(map(str, lengths)) + "\n")
    recipe = load_recipe(folder / "recipe.yaml", LAYOUTS[layout])
    return look_ahead(recipe, folder / "lengths.txt", steps, record=True)
