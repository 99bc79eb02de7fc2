"""evenload's numbers in the monitor of a DeepSpeed engine: TensorBoard, Weights & Biases, Comet, CSV files."""

from __future__ import annotations

from typing import Any

from ...unmodified.planned_loop import PlannedLoop


def tell_monitor(engine: Any, loop: PlannedLoop) -> None:
    """Write the numbers of a step that is about to run, beside the engine's own of it and under the same count of
    samples, where the ds_config has a monitor; rank 0 has them."""
    if not engine.monitor.enabled or engine.global_rank:
        return
    samples = engine.global_samples + engine.train_batch_size()
    engine.monitor.write_events([(f"Train/Samples/{name}", value, samples) for name, value in loop.numbers.items()])
