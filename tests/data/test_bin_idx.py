import struct

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data.lengths import read_lengths
from evenload.data.sources import open_source

DOCUMENTS = [[5, 6, 7], [1, 2], [], [9] * 300, [65_000, 3]]


def write_pair(prefix, documents=DOCUMENTS, *, dtype="<u2", code=8, magic=b"MMIDIDX\0\0", version=1, modes=b""):
    """The documented layout, packed by hand."""
    lengths = [len(d) for d in documents]
    positions = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(struct.pack("<9sQBQQ", magic, version, code, len(lengths), len(lengths) + 1))
        stream.write(np.array(lengths, "<i4").tobytes() + positions.astype("<i8").tobytes())
        stream.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes() + modes)
    np.array([token for document in documents for token in document], dtype).tofile(f"{prefix}.bin")
    return str(prefix)


@pytest.mark.slow
@pytest.mark.parametrize("numpy_type", ["uint16", "int32", "int64", "uint8"])
def test_what_megatron_writes_is_read(tmp_path, numpy_type):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    documents = [[token % 251 for token in document] for document in DOCUMENTS]
    prefix = str(tmp_path / "corpus_text_document")
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, numpy_type))
    for document in documents:
        builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
    builder.finalize(f"{prefix}.idx")

    source = open_source(prefix, max_length=None, min_length=1)
    theirs = indexed_dataset.IndexedDataset(prefix)
    kept = [i for i, document in enumerate(documents) if document]
    assert [source.tokens(n).tolist() for n in range(len(kept))] == [theirs[i].tolist() for i in kept]
    assert source.report()["empty"] == 1
    assert source.vocab_size == max(map(max, (documents[i] for i in kept))) + 1


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_prefix_and_either_file_name_the_pair(tmp_path, ending):
    source = open_source(write_pair(tmp_path / "my.corpus") + ending, max_length=100, long_samples="split")
    assert source.lengths.tolist() == [3, 2, 100, 100, 100, 2]
    assert source.tokens(5).tolist() == [65_000, 3]
    assert source.tokens(5).dtype == np.int64


def test_the_index_alone_gives_lengths(tmp_path):
    write_pair(tmp_path / "corpus", [[1], [2, 3]])
    (tmp_path / "corpus.bin").unlink()
    assert read_lengths(tmp_path / "corpus.idx").tolist() == [1, 2]


def test_an_empty_sequence_is_no_length(tmp_path):
    write_pair(tmp_path / "corpus")
    with pytest.raises(EvenloadError, match=r"sequence 2 of .*\n  found: 0"):
        read_lengths(tmp_path / "corpus.idx")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"magic": b"MMIDIDY\0\0"}, "not a whole Megatron index"),
        ({"version": 2}, "version 2"),
        ({"code": 9}, "type code 9"),
        ({"code": 7}, "float32"),
        ({"documents": []}, "no sequence"),
        ({"documents": [[], []]}, "holds no token"),
        ({"modes": bytes([0, 0, 1, 0, 0])}, "multimodal"),
        ({"modes": b"\0"}, "bytes, .* expected"),
        ({"code": 5}, "position that is not that of a token"),
        ({"documents": [[1, 2], [3, 4]], "code": 4}, "does not fit its index"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, settings, message):
    prefix = write_pair(tmp_path / "corpus", **settings)
    with pytest.raises(EvenloadError, match=message) as caught:
        open_source(prefix, max_length=8)
    assert caught.value.found
    assert caught.value.do


@pytest.mark.parametrize("kept", [0, 8, 20, 33, 60])
def test_a_cut_off_index_is_refused(tmp_path, kept):
    prefix = write_pair(tmp_path / "corpus")
    content = (tmp_path / "corpus.idx").read_bytes()
    (tmp_path / "corpus.idx").write_bytes(content[:kept])
    with pytest.raises(EvenloadError, match="not a whole Megatron index"):
        open_source(prefix, max_length=8)


def test_a_bin_that_is_cut_off_or_missing_is_refused(tmp_path):
    prefix = write_pair(tmp_path / "corpus")
    content = (tmp_path / "corpus.bin").read_bytes()
    for wrong in (content[:-1], content + b"\0\0", b""):
        (tmp_path / "corpus.bin").write_bytes(wrong)
        with pytest.raises(EvenloadError, match="does not fit its index"):
            open_source(prefix, max_length=8)
    (tmp_path / "corpus.bin").unlink()
    with pytest.raises(EvenloadError, match=r"corpus\.bin cannot be read"):
        open_source(prefix, max_length=8)
    (tmp_path / "corpus.idx").unlink()
    with pytest.raises(EvenloadError, match=r"corpus\.idx cannot be read"):
        open_source(prefix + ".bin", max_length=8)


def test_negative_lengths_and_positions_are_refused(tmp_path):
    prefix = write_pair(tmp_path / "corpus")
    content = bytearray((tmp_path / "corpus.idx").read_bytes())
    for offset, form in ((34, "<i"), (34 + 4 * len(DOCUMENTS), "<q")):
        damaged = content.copy()
        struct.pack_into(form, damaged, offset, -2)
        (tmp_path / "corpus.idx").write_bytes(damaged)
        with pytest.raises(EvenloadError, match="not a whole Megatron index"):
            open_source(prefix, max_length=8)


def test_impossible_tokens_are_refused_when_read(tmp_path):
    source = open_source(write_pair(tmp_path / "corpus", [[1, 2], [3, -4]], dtype="<i4", code=4), max_length=8)
    assert source.tokens(0).tolist() == [1, 2]
    with pytest.raises(EvenloadError, match=r"sequence 1 of .*\n  found: -4"):
        source.tokens(1)
    source = open_source(write_pair(tmp_path / "corpus"), max_length=8, vocab_size=100)
    assert source.vocab_size == 100
    with pytest.raises(EvenloadError, match="found: 65000, vocabulary of 100"):
        source.tokens(3)
