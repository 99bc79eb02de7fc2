"""Losses of another model on disk: every token at its place, and none of other data."""

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data.mixed import MixedSource
from evenload.data.sources import open_source, targets_of
from evenload.plugins.data.reference import NAME, UNFINISHED, LossFiles, ReferenceLosses, left_unfinished

from ...data.files import jsonl


def opened(folder, name, count):
    sizes = [3 + (5 * i + ord(name)) % 11 for i in range(count)]
    rows = [{"input_ids": list(range(n)), "labels": [-100, *range(1, n)]} for n in sizes]
    return open_source(jsonl(folder / f"{name}.jsonl", rows), max_length=64)


def written(folder, source):
    files, rng = LossFiles(folder, source), np.random.default_rng(0)
    losses = {i: rng.random(n).astype(np.float32) for i, n in enumerate(source.lengths.tolist())}
    for sample in reversed(list(losses)):
        files.write(sample, losses[sample])
    assert files.finish() == 4 * source.lengths.sum()
    return losses


def test_every_token_is_where_it_was_whatever_stands_beside_it(tmp_path):
    a, b, c = (opened(tmp_path, name, count) for name, count in (("a", 7), ("b", 1), ("c", 5)))
    whole = MixedSource({"c": c, "a": a, "b": b})
    losses = written(tmp_path / "kept", whole)
    reference = ReferenceLosses(tmp_path / "kept", whole)
    for sample, own in losses.items():
        assert reference.of(sample).tolist() == own.tolist()
    for name, first, stop in (("a", 0, 7), ("b", 7, 8), ("c", 8, 13)):
        kept = np.load(tmp_path / "kept" / f"{name}.npy")
        assert kept.tolist() == np.concatenate([losses[i] for i in range(first, stop)]).tolist()
    means = [losses[i].astype(float).sum() / targets_of(whole)[i] for i in (11, 0, 7)]
    assert reference.means(np.array([11, 0, 7])) == pytest.approx(means, rel=1e-12)
    fewer = MixedSource({"a": a, "c": c})
    assert ReferenceLosses(tmp_path / "kept", fewer).of(7).tolist() == losses[8].tolist()
    alone = written(tmp_path / "alone", b)
    assert ReferenceLosses(tmp_path / "alone", b).of(0).tolist() == alone[0].tolist()


def test_other_data_and_damaged_files_are_refused(tmp_path):
    a, b = opened(tmp_path, "a", 7), opened(tmp_path, "b", 6)
    with pytest.raises(EvenloadError, match="not there, or not whole"):
        ReferenceLosses(tmp_path, a)
    written(tmp_path / "kept", MixedSource({"a": a}))
    with pytest.raises(EvenloadError, match="are of other data"):
        ReferenceLosses(tmp_path / "kept", MixedSource({"a": b}))
    with pytest.raises(EvenloadError, match="are of other data"):
        ReferenceLosses(tmp_path / "kept", MixedSource({"a": a, "b": b}))
    np.save(tmp_path / "kept" / "a.npy", np.zeros(3, np.float32))
    with pytest.raises(EvenloadError, match="are damaged"):
        ReferenceLosses(tmp_path / "kept", MixedSource({"a": a}))
    (tmp_path / "kept" / "a.npy").write_bytes(b"no array")
    with pytest.raises(EvenloadError, match="cannot be read"):
        ReferenceLosses(tmp_path / "kept", MixedSource({"a": a}))
    (tmp_path / "kept" / NAME).write_text("[]")
    with pytest.raises(EvenloadError, match="reference"):
        ReferenceLosses(tmp_path / "kept", MixedSource({"a": a}))


def test_files_that_were_left_unfinished_are_begun_anew_and_those_of_others_stay(tmp_path):
    a, b = opened(tmp_path, "a", 7), opened(tmp_path, "b", 6)
    kept = tmp_path / "kept"
    LossFiles(kept, MixedSource({"a": a, "b": b})).write(0, np.ones(a.lengths[0]))
    assert left_unfinished(kept) == {UNFINISHED, "a.npy", "b.npy"} == {path.name for path in kept.iterdir()}
    with pytest.raises(EvenloadError, match="not there, or not whole"):
        ReferenceLosses(kept, MixedSource({"a": a, "b": b}))
    (kept / "c.npy").write_text("somebody's")
    losses = written(kept, MixedSource({"b": b}))
    assert {path.name for path in kept.iterdir()} == {NAME, "b.npy", "c.npy"}
    assert (ReferenceLosses(kept, MixedSource({"b": b})).of(0) == losses[0]).all()
    assert left_unfinished(kept) == set()


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"data": ["a"]}', '{"data": {"../theirs": ""}}', "[" * 9999])
def test_names_are_of_entries_of_the_folder_and_nothing_else(tmp_path, text):
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "theirs.npy").write_text("notes")
    (kept / UNFINISHED).write_text(text)
    written(kept, opened(tmp_path, "a", 3))
    assert (tmp_path / "theirs.npy").read_text() == "notes"
    assert left_unfinished(tmp_path / "nowhere") == set()


def test_links_and_folders_are_of_others(tmp_path):
    (tmp_path / "a.npy").symlink_to("theirs")
    (tmp_path / "b.npy").mkdir()
    (tmp_path / "c.npy").touch()
    (tmp_path / UNFINISHED).write_text('{"data": {"a": "", "b": "", "c": ""}}')
    assert left_unfinished(tmp_path) == {UNFINISHED, "c.npy"}
