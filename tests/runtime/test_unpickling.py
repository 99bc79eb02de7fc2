"""Files of checkpoints are read as data: what would run code is refused by name, and not run."""

import os
import pickle
import pickletools

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.runtime.unpickling import FORCE, refuse_code, tensors_only


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Row:
    """Data of somebody's own."""

    def __init__(self):
        self.value = 3


def load(path):
    """As a trainer loads."""
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path, zipped):
    file, victim = tmp_path / "state.pt", tmp_path / "victim"
    torch.save({"x": Evil(victim)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(EvenloadError, match="more than tensors") as caught, tensors_only("it", (), trust=False):
        load(file)
    assert "mkdir" in caught.value.found
    assert "checkpoint.trust=true" in caught.value.do
    assert not victim.exists()
    assert FORCE not in os.environ
    with tensors_only("it", (), trust=True):
        load(file)
    assert victim.exists()


def test_tensors_plain_data_and_named_classes_load(tmp_path):
    file = tmp_path / "state.pt"
    torch.save({"t": torch.arange(3), "n": [1, 2.0, "three", None], "row": Row()}, file)
    with tensors_only("it", (Row,), trust=False):
        state = load(file)
    assert state["row"].value == 3
    assert state["t"].tolist() == [0, 1, 2]
    with pytest.raises(EvenloadError), tensors_only("it", (), trust=False):
        load(file)


def test_other_errors_pass_through(tmp_path):
    with pytest.raises(FileNotFoundError), tensors_only("it", (), trust=False):
        load(tmp_path / "nothing")


def test_a_pickle_may_name_what_is_allowed_and_nothing_behind_it(tmp_path):
    index, victim = tmp_path / "index", tmp_path / "victim"
    index.write_bytes(pickle.dumps(Row()))
    name = f"{Row.__module__}.{Row.__qualname__}"
    refuse_code(index, {name}, trust=False)
    with pytest.raises(EvenloadError, match="more than tensors"):
        refuse_code(index, {name + "x"}, trust=False)
    index.write_bytes(pickle.dumps(Evil(victim)))
    with pytest.raises(EvenloadError) as caught:
        refuse_code(index, {name}, trust=False)
    assert "mkdir" in caught.value.found
    assert not victim.exists()
    refuse_code(index, {name}, trust=True)


def test_an_attribute_of_an_allowed_module_is_another_name(tmp_path):
    """Protocol 4 looks dotted names up: module ``pathlib``, name ``os.mkdir``."""
    index, victim = tmp_path / "index", tmp_path / "victim"
    program = pickle.PROTO + b"\x04"
    for text in (b"pathlib", b"os.mkdir"):
        program += pickle.SHORT_BINUNICODE + bytes([len(text)]) + text
    path = str(victim).encode()
    program += pickle.STACK_GLOBAL + pickle.SHORT_BINUNICODE + bytes([len(path)]) + path
    program += pickle.TUPLE1 + pickle.REDUCE + pickle.STOP
    pickletools.dis(program, out=(tmp_path / "listing").open("w"))  # it is a valid pickle
    index.write_bytes(program)
    with pytest.raises(EvenloadError):
        refuse_code(index, {"pathlib.PosixPath"}, trust=False)
    assert not victim.exists()


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage"])
def test_a_torn_file_is_left_to_its_reader(tmp_path, content):
    (tmp_path / "index").write_bytes(content)
    refuse_code(tmp_path / "index", (), trust=False)
    refuse_code(tmp_path / "missing", (), trust=False)
