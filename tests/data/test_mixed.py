"""Several sources as one: the samples of each, numbered through all by ascending names."""

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data.mixed import MixedSource, naming_domain
from evenload.data.sources import open_source

from .files import jsonl


@pytest.fixture
def parts(tmp_path):
    """One of plain ids, and one whose first half carries no loss."""
    plain = [{"input_ids": list(range(i, i + 5))} for i in range(4)]
    masked = [{"input_ids": [9, 8, 7, 6], "labels": [-100, -100, 7, 6]} for _ in range(3)]
    sets = {"web": plain, "code": masked}
    return {name: open_source(jsonl(tmp_path / f"{name}.jsonl", rows), max_length=64) for name, rows in sets.items()}


def test_each_sample_is_that_of_its_domain(parts):
    mixed = MixedSource(parts)
    assert mixed.domains == ("code", "web")
    assert mixed.lengths.tolist() == [4] * 3 + [5] * 4
    assert mixed.targets.tolist() == [2] * 3 + [4] * 4, "where one masks tokens, the others say what they have"
    assert mixed.numbers.domain_of(np.array([0, 2, 3, 6])).tolist() == [0, 0, 1, 1]
    assert mixed.tokens(4).tolist() == parts["web"].tokens(1).tolist() == mixed.labels(4).tolist()
    assert mixed.labels(2).tolist() == parts["code"].labels(2).tolist() == [-100, -100, 7, 6]
    assert mixed.vocab_size == max(part.vocab_size for part in parts.values())
    with pytest.raises(IndexError):
        mixed.tokens(7)


def test_a_report_has_every_domain_and_their_sums(parts):
    assert MixedSource({"web": parts["web"], "more": parts["web"]}).targets is None, "where none masks tokens"
    report = MixedSource(parts).report()
    assert (report["samples"], report["tokens"], report["targets"], report["longest"]) == (7, 32, 22, 5)
    assert report["domains"]["web"] == parts["web"].report()
    assert MixedSource(dict(reversed(parts.items()))).fingerprint == report["fingerprint"]
    assert MixedSource({"web": parts["web"]}).fingerprint != report["fingerprint"]


def test_what_is_wrong_with_a_domain_names_it(tmp_path):
    with pytest.raises(EvenloadError, match="the domain web: there is no data"), naming_domain("web"):
        open_source(str(tmp_path / "nothing"), max_length=64)
