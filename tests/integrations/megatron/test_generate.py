"""A host's samples are those of plain generation, token for token, however ranks, slots and caches divide the work."""

from __future__ import annotations

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow
ALL = {"slots": 64}
SMALL = {"slots": 4, "cache_tokens": 80, "step_tokens": 9}
TP2, PP2 = {"parallel__tp": 2}, {"parallel__pp": 2}


@pytest.mark.parametrize(
    ("size", "changes", "ways"),
    [
        pytest.param(
            2, {}, [{"slots": 64, "backwards": True}, {"moves": 5}, {"slots": 3, "moves": 6}], id="data parallel"
        ),
        pytest.param(2, TP2, [SMALL], id="tensor parallel"),
        pytest.param(2, PP2, [{**SMALL, "slots": 5}], id="a pipeline"),
        only_full(4, {}, [{"slots": 1}, {"moves": 1}, {**SMALL, "moves": 2}], id="data parallel, more"),
        only_full(4, TP2, [ALL, {**SMALL, "moves": 3}], id="tensor parallel, more"),
        only_full(4, PP2, [ALL, SMALL, {**ALL, "moves": 4}], id="a pipeline, more"),
        only_full(4, {**PP2, **TP2}, [{"slots": 5}], id="stages of tensor-parallel ranks"),
    ],
)
def test_samples_are_those_of_plain_generation(on_ranks, size, changes, ways):
    results = on_ranks(size, "generated", ways=ways, **changes)
    for result in results:
        assert not result["changed"]
        for row, way in zip(result["ways"], ways, strict=True):
            assert row["keys"]
            assert row["other"] == 0
            assert row["error"] < 1e-9
            assert row["ended"] == ["end", "limit"]
            assert (row["moved"] > 2 if size == 2 else row["moved"]) if "moves" in way else row["moved"] == 0
    for number in range(len(ways)):
        seen = [key for result in results for key in result["ways"][number]["seen"]]
        assert sorted(seen) == sorted((prompt, sample) for prompt in range(4) for sample in (0, 1))


LONG = [(0, (1, 2, 3), 8), (1, (4, 5), 126)]
REFUSED = {
    "there is no prompt": {"requests": []},
    "prompt 0 has no token": {"requests": [(0, (), 3)]},
    "prompt 4 has tokens that the model does not": {"requests": [(4, (1, 96), 3)]},
    "no token may follow prompt 2": {"requests": [(2, (1,), 0)]},
    "smaller than one sample": {"requests": LONG, "cap": 112},
}


def test_what_cannot_be_generated_is_said_before_the_first_token(on_ranks):
    (said,) = on_ranks(1, "generation_refused", cases=list(REFUSED.values()))
    assert all(text in words for text, words in zip(REFUSED, said, strict=True)), said


V = {**PP2, "plugins__pipeline": {"enabled": True, "v_shape": True}}
EXPERTS = {"model__family": "mixtral", "model__moe": {"num_experts": 4}, "parallel__ep": 2}


@pytest.mark.parametrize(
    ("size", "changes", "text"),
    [
        pytest.param(1, {"data__max_length": 127}, "prompt 1 and what may follow are longer", id="beyond the model"),
        pytest.param(2, V, "two stages a device", id="a V"),
        pytest.param(2, EXPERTS, "parallel.ep 2", id="experts"),
    ],
)
def test_so_is_what_a_model_cannot_generate(on_ranks, size, changes, text):
    assert all(text in said for (said,) in on_ranks(size, "generation_refused", cases=[{"requests": LONG}], **changes))
