"""The door: files and values of users are read, or refused with one short message."""

import json
import os
import socket

import pytest
import yaml
from evenload.core.errors import SHOWN, EvenloadError
from evenload.core.input import reading
from hypothesis import example, given
from hypothesis import strategies as st

WORDS = st.text(st.characters(categories=["L", "N", "Zs"]), max_size=8)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False), WORDS)
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=15,
)


@given(DOCUMENTS)
def test_yaml_and_json_give_back_what_was_written(document):
    assert reading.parse_yaml(yaml.safe_dump(document), "it") == document
    assert reading.parse_json(json.dumps(document), "it", "do") == document


@given(st.one_of(st.text(), st.text("[]{}:,&*!|>-#%@`'\"\n ab1.\t")))
@example("2001-99-99 99:99:99")
@example("!!int ''")
@example("!!timestamp x")
@example("!!float ''")
@example("!!python/object/apply:os.system [exit]")
@example("[" * 10_000)
@example("1" * 5000)
@example("0x" + "f" * 5000)
@example("*a")
@example("&a [*a]")
@example("&a {b: *a}")
@example("{[1]: 2}")
@example('"\\ud800"')
def test_any_text_is_a_value_or_refused(text):
    error = None
    try:
        json.dumps(reading.parse_yaml(text, "it"))
    except EvenloadError as refused:
        error = refused
    assert error is None or (error.what == "it is not YAML" and 0 < len(error.found) <= SHOWN)


def test_dates_are_text_and_numbers_are_numbers():
    values = reading.parse_yaml("[2001-01-01, 1e3, 1.0e+3, 0x10, on, ~]", "it")
    assert values == ["2001-01-01", "1e3", 1000.0, 16, True, None]


def test_anchors_are_written_out_so_that_one_place_can_be_set_alone():
    value = reading.parse_yaml("a: &a {x: [1]}\nb: *a\nc: {<<: *a, y: 2}\n", "it")
    value["a"]["x"].append(2)
    assert value == {"a": {"x": [1, 2]}, "b": {"x": [1]}, "c": {"x": [1], "y": 2}}


BOMBS = {
    "lists": "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}' if i else 'l'] * 9)}]\n" for i in range(10)),
    "texts": "a: &a " + "x" * 100_000 + "\nb: [" + ", ".join(["*a"] * 1000) + "]\n",
    "merges": "a: &a0 {k: 1}\n" + "".join(f"b{i}: &a{i + 1} {{<<: [*a{i}, *a{i}]}}\n" for i in range(40)),
    "a chain": "".join(f"b{i}: &b{i} [{f'*b{i - 1}' if i else '1'}]\n" for i in range(1000)),
    "depth": "a: " * 3 + "[" * 10_000,
    "breadth": "[" + "1, " * 30_000 + "1]",
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_fill_the_memory_is_refused_first(name):
    with pytest.raises(EvenloadError, match="is not YAML"):
        reading.parse_yaml(BOMBS[name], "it")


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 60 + "]" * 60, "1" * 5000, b"\xff", "{", ""])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(EvenloadError, match="it is not JSON") as caught:
        reading.parse_json(text, "it", "do")
    assert len(caught.value.found) <= SHOWN


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: opening it would wait for ever
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "zero").symlink_to("/dev/zero")
    kinds = {"pipe": "a pipe", "socket": "a socket", "zero": "a device", ".": "a folder", "nowhere": "No such file"}
    kinds |= {"loop": "symbolic links", "x" * 300: "too long", "a\0b": "null byte", "\ud800": "surrogates"}
    for name, found in kinds.items():
        with pytest.raises(EvenloadError, match="the thing cannot be read") as caught:
            reading.open_file(f"{tmp_path}/{name}", "the thing", "do")
        assert found in caught.value.found
    for odd in (None, 5, 1.5, True, [], object()):
        with pytest.raises(EvenloadError, match="the thing cannot be read"):
            reading.open_file(odd, "the thing", "do")


def test_no_more_is_read_than_the_kind_allows(tmp_path):
    path = tmp_path / "a.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(EvenloadError, match="is too large"):
        reading.read_yaml(path, "it", "do")
    path.write_bytes(b"a: \xe9")
    with pytest.raises(EvenloadError, match="no UTF-8"):
        reading.read_yaml(path, "it", "do")
    path.write_text("a: ä")
    assert reading.read_yaml(path, "it", "do") == {"a": "ä"}


def test_who_changes_what_was_read_changes_it_for_nobody_else():
    first = reading.parse_yaml("a: {b: [1]}", "it")
    first["a"]["b"].append(2)
    assert reading.parse_yaml("a: {b: [1]}", "it") == {"a": {"b": [1]}}
