import json
import sys
from itertools import chain

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data import arrow
from evenload.data.sources import open_source
from hypothesis import given
from hypothesis import strategies as st

from .files import tokenizer

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

IDS = [[1, 2, 3], [4, 5], None, [], [6] * 10]
TEXTS = ["hello", "w\u00f6rter", None, "", "end"]
WANTED_IDS = [ids for ids in IDS if ids]
WANTED_TEXTS = [text.encode() for text in TEXTS if text]
ID_TYPES = [pa.list_(pa.int32()), pa.list_(pa.uint8()), pa.large_list(pa.int64()), pa.list_(pa.uint16())]


def save(path, chunks, column, kind, file_format=False):
    """Record batches in the stream format, which is what `Dataset.save_to_disk` writes, or in the file format."""
    schema = pa.schema([("other", pa.int64()), (column, kind)])
    with (pa.ipc.new_file if file_format else pa.ipc.new_stream)(str(path), schema) as writer:
        for rows in chunks:
            columns = [pa.array([0] * len(rows), pa.int64()), pa.array(rows, kind)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return str(path)


def tokens_of(source):
    return [source.tokens(i).tolist() for i in range(len(source.lengths))]


@pytest.mark.parametrize("kind", ID_TYPES, ids=str)
@pytest.mark.parametrize("file_format", [False, True])
def test_ids_come_back_from_every_layout(tmp_path, kind, file_format):
    path = save(tmp_path / "a.arrow", [IDS[:2], [], IDS[2:]], "input_ids", kind, file_format)
    source = open_source(path, max_length=None)
    assert tokens_of(source) == WANTED_IDS
    assert (source.vocab_size, source.report()["empty"]) == (7, 2)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_text_comes_back_as_bytes(tmp_path, kind):
    source = open_source(save(tmp_path / "a.arrow", [TEXTS[:3], TEXTS[3:]], "text", kind), max_length=None)
    assert [bytes(tokens) for tokens in tokens_of(source)] == WANTED_TEXTS
    assert source.vocab_size == 256


def test_lists_of_a_fixed_size(tmp_path):
    path = save(tmp_path / "a.arrow", [[[1, 2], [3, 4]], [[5, 6]]], "tokens", pa.list_(pa.int32(), 2))
    assert tokens_of(open_source(path, max_length=None)) == [[1, 2], [3, 4], [5, 6]]


@given(
    documents=st.lists(st.lists(st.integers(0, 99), max_size=12), min_size=1, max_size=20).filter(any),
    rows=st.integers(1, 7),
)
def test_splitting_keeps_every_token_across_chunks(documents, rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("arrow") / "a.arrow"
    save(path, [documents[i : i + rows] for i in range(0, len(documents), rows)], "input_ids", pa.list_(pa.int32()))
    source = open_source(str(path), max_length=5, long_samples="split", min_length=1)
    assert list(chain(*tokens_of(source))) == list(chain(*documents))


def test_lengths_are_known_without_reading_tokens(tmp_path, monkeypatch):
    path = save(tmp_path / "a.arrow", [[[1] * n for n in range(1, 50)]], "input_ids", pa.list_(pa.int32()))

    class Untouchable(np.ndarray):
        def __getitem__(self, key):
            pytest.fail("a token was read")

    whole = arrow._chunk
    monkeypatch.setattr(arrow, "_chunk", lambda *a: (c := whole(*a))._replace(values=c.values.view(Untouchable)))
    assert open_source(path, max_length=20).lengths.tolist() == [min(n, 20) for n in range(2, 50)]


def test_text_under_a_tokenizer_is_counted_once(tmp_path, monkeypatch):
    file = tokenizer(tmp_path, {"a": 0, "b": 1, "?": 2}, begin="b")
    path = save(tmp_path / "a.arrow", [["a b", None], ["a b c a", ""]], "text", pa.string())

    def opened():
        return open_source(path, max_length=None, min_length=1, tokenizer=str(file))

    # An empty text has its special token, a null nothing.
    assert tokens_of(opened()) == [[1, 0, 1], [1, 0, 1, 2, 0], [1]]
    monkeypatch.setattr(arrow.ArrowDocuments, "_count", lambda self: pytest.fail("tokenised again"))
    assert opened().lengths.tolist() == [3, 5, 1]


def save_dataset(folder, shards):
    """The layout of `Dataset.save_to_disk` (datasets 5.2)."""
    folder.mkdir()
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        save(folder / name, [rows], "input_ids", pa.list_(pa.int32()))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], "_split": None}))
    (folder / "dataset_info.json").write_text("{}")
    save(folder / "cache-0123.arrow", [[[99, 99]]], "input_ids", pa.list_(pa.int32()))  # left by Dataset.map
    return folder


def test_a_saved_data_set_is_its_shards_in_order(tmp_path):
    folder = save_dataset(tmp_path / "set", [[[1, 2], [3, 4]], [[5, 6]]])
    assert tokens_of(open_source(str(folder), max_length=None)) == [[1, 2], [3, 4], [5, 6]]


def test_a_saved_data_set_must_be_whole(tmp_path):
    folder = save_dataset(tmp_path / "set", [[[1, 2]], [[5, 6]]])
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(EvenloadError, match=r"missing files: data-00001-of-00002\.arrow"):
        open_source(str(folder), max_length=None)
    state = folder / "state.json"
    for content, message in [
        ("{", "is not JSON"),
        ("[]", "holds no mapping"),
        ("{}", "is damaged"),
        ('{"_data_files": []}', "no data files"),
    ]:
        state.write_text(content)
        with pytest.raises(EvenloadError, match=message):
            open_source(str(folder), max_length=None)
    state.write_text('{"_data_files": [{"filename": "data-00000-of-00002.arrow"}], "_indices_data_files": [{}]}')
    with pytest.raises(EvenloadError, match="an index next to the data"):
        open_source(str(folder), max_length=None)


def test_a_folder_of_splits_names_them(tmp_path):
    (tmp_path / "both").mkdir()
    for split in ("test", "train"):
        save_dataset(tmp_path / "both" / split, [[[1, 2]]])
    with pytest.raises(EvenloadError, match=r"below it: train, test\n  do: open one of them, as .*/both/train"):
        open_source(str(tmp_path / "both"), max_length=None)


@pytest.mark.parametrize(
    ("column", "rows", "kind"), [("input_ids", IDS, pa.list_(pa.int32())), ("text", TEXTS, pa.string())]
)
def test_parquet_holds_the_same_samples(tmp_path, cache, column, rows, kind):
    table = pa.table({"other": list(range(5)), column: pa.array(rows, kind)})
    for i in range(2):
        pq.write_table(table, tmp_path / f"train-0000{i}-of-00002.parquet", row_group_size=2)
    for spec in (tmp_path, tmp_path / "train-*.parquet"):
        found = [bytes(tokens) for tokens in tokens_of(open_source(str(spec), max_length=None))]
        assert found == 2 * (WANTED_TEXTS if column == "text" else [bytes(ids) for ids in WANTED_IDS])
    assert len(list(cache.glob("*.arrow"))) == 1
    assert len(open_source(str(tmp_path / "train-00000-of-00002.parquet"), max_length=None).lengths) == 3


def test_splits_and_formats_are_not_mixed(tmp_path):
    table = pa.table({"input_ids": [[1, 2]]})
    for split in ("train", "test"):
        pq.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    with pytest.raises(EvenloadError, match=r"more than one data set\n.*test, train\n.*pattern"):
        open_source(str(tmp_path), max_length=None)
    assert len(open_source(str(tmp_path / "train-*.parquet"), max_length=None).lengths) == 1


def test_parquet_files_must_agree(tmp_path):
    pq.write_table(pa.table({"text": ["ab"]}), tmp_path / "a.parquet")
    for other in ({"text": [[1, 2]]}, {"words": ["ab"]}):
        pq.write_table(pa.table(other), tmp_path / "b.parquet")
        with pytest.raises(EvenloadError, match=r"differs from .* in column 'text'"):
            open_source(str(tmp_path), max_length=None)


def test_arrow_files_must_agree(tmp_path):
    save(tmp_path / "a.arrow", [["ab"]], "text", pa.string())
    save(tmp_path / "b.arrow", [[[1, 2]]], "text", pa.list_(pa.int32()))
    with pytest.raises(EvenloadError, match="differs from file to file"):
        open_source(str(tmp_path), max_length=None)
    save(tmp_path / "b.arrow", [["ab"]], "words", pa.string())
    with pytest.raises(EvenloadError, match="has no column 'text'"):
        open_source(str(tmp_path), max_length=None)


@pytest.mark.parametrize("name", ["a.arrow", "a.parquet"])
def test_damaged_files_are_refused(tmp_path, name):
    path = tmp_path / name
    if name == "a.arrow":
        save(path, [[[1] * 5000]], "input_ids", pa.list_(pa.int32()))
    else:
        pq.write_table(pa.table({"input_ids": [list(range(5000))]}), path)
    content = path.read_bytes()
    for damage in (b"", b"garbage, not a table", content[: len(content) // 2], content[:6]):
        path.write_bytes(damage)
        with pytest.raises(EvenloadError, match="is not a whole") as caught:
            open_source(str(path), max_length=None)
        assert caught.value.found
        assert caught.value.do


@pytest.mark.parametrize(
    ("column", "rows", "kind", "message"),
    [
        ("input_ids", [[1.0]], pa.list_(pa.float32()), "neither text nor lists of token ids"),
        ("tokens", [["a", "b"]], pa.list_(pa.string()), "neither text nor lists of token ids"),
        ("text", [5], pa.int64(), "neither text nor lists of token ids"),
        ("input_ids", [[1, None]], pa.list_(pa.int32()), "lists with holes"),
        ("txt", ["a"], pa.string(), "did you mean 'txt'"),
        ("input_ids", [[]], pa.list_(pa.int32()), "no sample to train on"),
    ],
)
def test_columns_without_tokens_are_refused(tmp_path, column, rows, kind, message):
    with pytest.raises(EvenloadError, match=message) as caught:
        open_source(save(tmp_path / "a.arrow", [rows], column, kind), max_length=None)
    assert caught.value.found
    assert caught.value.do


def test_no_rows_at_all_are_refused(tmp_path):
    with pytest.raises(EvenloadError, match="no sample to train on"):
        open_source(save(tmp_path / "a.arrow", [], "input_ids", pa.list_(pa.int32())), max_length=None)
    with pytest.raises(EvenloadError, match="no sample to train on"):
        open_source(save(tmp_path / "b.arrow", [], "text", pa.string()), max_length=None)


def test_negative_ids_are_refused_when_read(tmp_path):
    source = open_source(
        save(tmp_path / "a.arrow", [[[1, 2], [3, -1]]], "input_ids", pa.list_(pa.int32())), max_length=None
    )
    assert source.tokens(0).tolist() == [1, 2]
    with pytest.raises(EvenloadError, match=r"row 1 of .*\n  found: -1"):
        source.tokens(1)


def test_a_missing_pyarrow_is_named_with_its_command(tmp_path, monkeypatch):
    path = save(tmp_path / "a.arrow", [[[1, 2]]], "input_ids", pa.list_(pa.int32()))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EvenloadError, match="pip install pyarrow"):
        open_source(path, max_length=None)
