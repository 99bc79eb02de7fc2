"""The last good checkpoint survives whatever happens to the next one, and no damaged one is gone on from."""

import json
import multiprocessing
import os
import random
import time

import pytest
from evenload.core.errors import EvenloadError, RankError
from evenload.training.checkpoint import checkpoints, manifest


def write_bytes(directory):
    (directory / "shard").write_bytes(b"x" * 1000)


def save(root, step, write=write_bytes, keep=2):
    return checkpoints.save(root, step, {"order": step}, write, keep=keep)


def chosen(root, **how):
    newest = checkpoints.newest_whole(root, **how)
    return newest[0].name if newest else None


def test_saves_are_chosen_pruned_and_replaced(tmp_path):
    assert chosen(tmp_path) is None
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert sorted(d.name for d in tmp_path.glob("step*")) == ["step00000002", "step00000003"]
    newest = checkpoints.newest_whole(tmp_path)
    assert newest[0] == tmp_path / "step00000003"
    assert newest[1].state == {"step": 3, "order": 3}
    save(tmp_path, 3)
    save(tmp_path, 4, keep=1)
    assert [d.name for d in tmp_path.glob("step*")] == ["step00000004"]


@pytest.mark.parametrize(("number", "said"), [(28, "No space left on device"), (5, "Input/output error")])
def test_a_failing_writer_leaves_the_old_one(tmp_path, number, said):
    save(tmp_path, 1)

    def fail(directory):
        write_bytes(directory)
        raise OSError(number, said)

    with pytest.raises(RankError, match="step00000002 was not written") as caught:
        save(tmp_path, 2, fail)
    assert ("the disk is full" in caught.value.what) == ("free space" in caught.value.do) == (number == 28)
    assert said in caught.value.found
    assert "step00000001" in caught.value.do
    assert chosen(tmp_path) == "step00000001"
    save(tmp_path, 2)
    assert chosen(tmp_path) == "step00000002"


def changed(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def piped(path):
    """A pipe, which a reader would wait for, in the place of a file."""
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "truncated": lambda c: (c / "trainer" / "shard").write_bytes(b"x"),
    "removed": lambda c: (c / "trainer" / "shard").unlink(),
    "one bit": lambda c: flipped(c / "trainer" / "shard"),
    "a pipe": lambda c: piped(c / "trainer" / "shard"),
    "a pipe for a manifest": lambda c: piped(c / manifest.NAME),
    "a bit of the manifest": lambda c: changed(c / manifest.NAME, lambda d: d.update(order=7)),
    "manifest cut": lambda c: (c / manifest.NAME).write_text("{"),
    "manifest []": lambda c: (c / manifest.NAME).write_text("[]"),
    "manifest null": lambda c: (c / manifest.NAME).write_text("null"),
    "manifest deep": lambda c: (c / manifest.NAME).write_text("[" * 100_000),
    "manifest no text": lambda c: (c / manifest.NAME).write_bytes(b"\x80\xff"),
    "no manifest": lambda c: (c / manifest.NAME).unlink(),
    "of a later version": lambda c: changed(c / manifest.NAME, lambda d: d.update(format=99)),
}
OLD_FORM = {
    "files: [1]": lambda d: d.update(files=[1]),
    "files of no size": lambda d: d.update(files={"trainer/shard": "x"}),
    "step of text": lambda d: d.update(step="x"),
    "step -1": lambda d: d.update(step=-1),
    "no step": lambda d: d.pop("step"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_loudly(tmp_path, damage, caplog):
    save(tmp_path, 1)
    DAMAGES[damage](save(tmp_path, 2))
    assert chosen(tmp_path) == "step00000001"
    assert "the checkpoint step00000002 is damaged and passed over" in caplog.text
    assert "going on from the older checkpoint step00000001" in caplog.text


@pytest.mark.parametrize("damage", OLD_FORM)
def test_a_manifest_of_the_form_before_hashes_is_read_with_care(tmp_path, damage, caplog):
    def before_hashes(data):
        data.pop("hash")
        data.update(format=1, files={name: row[0] for name, row in data["files"].items()})

    for step in (1, 2):
        changed(save(tmp_path, step) / manifest.NAME, before_hashes)
    assert chosen(tmp_path) == "step00000002"
    assert "was written before evenload kept hashes" in caplog.text
    changed(tmp_path / "step00000002" / manifest.NAME, OLD_FORM[damage])
    assert chosen(tmp_path) == "step00000001"


def test_sizes_alone_are_compared_where_hashes_are_not_wanted(tmp_path):
    flipped(save(tmp_path, 1) / "trainer" / "shard")
    assert chosen(tmp_path, verify=False) == "step00000001"


def test_training_never_starts_anew_beside_damaged_checkpoints(tmp_path):
    for step in (1, 2):
        flipped(save(tmp_path, step) / "trainer" / "shard")
    with pytest.raises(EvenloadError, match=r"no checkpoint in .* is whole") as caught:
        checkpoints.newest_whole(tmp_path)
    assert "step00000002: trainer/shard has other content" in caught.value.found
    assert "resume=false" in caught.value.do


@pytest.mark.parametrize("text", ["../../../etc", "", "step00000009", "\x00"])
def test_a_bad_pointer_is_no_reason_to_stop(tmp_path, text):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / checkpoints.LATEST).write_text(text)
    assert chosen(tmp_path) == "step00000002"


def test_the_checkpoint_that_the_pointer_names_goes_before_a_newer_one(tmp_path):
    """Whoever went back to an earlier one saves behind that."""
    for step in (2, 4):
        save(tmp_path, step)
    save(tmp_path, 3, keep=3)
    assert (tmp_path / "step00000004").exists()
    assert chosen(tmp_path) == "step00000003"
    last = checkpoints.last_good(tmp_path)
    assert last.name == "step00000003"


def save_on_and_on(root, said):
    good = checkpoints.newest_whole(root)
    step = good[1].state["step"] if good else 0

    def write(directory):
        for k in range(4):
            (directory / f"shard{k}").write_bytes(b"x" * 200_000)

    while True:
        step += 1
        checkpoints.save(root, step, {}, write, keep=2)
        said.send(step)


@pytest.mark.slow
def test_kills_at_any_moment_never_tear_or_lose_a_checkpoint(tmp_path):
    acknowledged = 0
    delays = random.Random(5)
    for _ in range(6):
        hears, says = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=save_on_and_on, args=(tmp_path, says))
        child.start()
        acknowledged = max(acknowledged, hears.recv())
        time.sleep(0.2 * delays.random())
        child.kill()
        child.join()
        while hears.poll():
            acknowledged = max(acknowledged, hears.recv())
        good = checkpoints.newest_whole(tmp_path)
        assert good[1].state["step"] >= acknowledged
        acknowledged = good[1].state["step"]
