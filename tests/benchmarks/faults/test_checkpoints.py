"""`benchmarks/faults/checkpoints.py` at a small size: both questions are answered, and nothing stays behind."""

from __future__ import annotations

import evenload
import pytest

RECIPE = f"{evenload.__path__[0]}/recipes/quickstart.yaml"
SIZES = ("model.num_layers=1", "model.hidden_size=64", "data.max_length=256", "train.global_batch_size=2")


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ((), {"step", "save with hashes", "save without", "compare hashes"}),
        (("--background",), {"step", "save, foreground", "save, background"}),
    ],
)
def test_every_row_is_a_time(options, rows, benchmark, tmp_path):
    here = f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n"
    result = benchmark("faults/checkpoints.py", RECIPE, *SIZES, *options, "--repeats", 1, planted=here)
    assert result["seconds"].keys() == rows
    assert all(len(times) == 1 or name == "step" for name, times in result["all"].items())
    assert 0 < min(result["seconds"].values()) <= max(result["seconds"].values()) < 60
    assert 0.5 < result["mib"] < 5
    assert not list(tmp_path.glob("checkpoints-*"))
