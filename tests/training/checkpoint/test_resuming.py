"""A run goes on from its own checkpoint with its own data, and from nothing else."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from evenload.core.errors import EvenloadError
from evenload.data.mixed import MixedSource
from evenload.data.sources import open_source
from evenload.training.checkpoint import manifest, resuming

ORDER = {"algorithm": "any", "epoch": 3}


class Host:
    """Notes what it is asked to load and save."""

    def __init__(self):
        self.loaded = []

    def save(self, directory):
        (directory / "weights").write_bytes(b"w" * 64)

    def load(self, directory):
        self.loaded.append(directory)


class Watchdog:
    @contextmanager
    def working(self, *_):
        yield


def rows(path, letter):
    path.write_text("".join(json.dumps({"text": letter * 8}) + "\n" for _ in range(64)))
    return path


def job(folder, letter="a", **config):
    """A job whose data are rows of a letter."""
    source = open_source(str(rows(folder / "data.jsonl", letter)), max_length=64)
    checkpoint = SimpleNamespace(dir=folder / "kept", verify=True, keep=2, **config)
    recipe = SimpleNamespace(checkpoint=checkpoint, model_dump=lambda **_: {"kept": "recipe"})
    return SimpleNamespace(recipe=recipe, source=source, host=Host(), watchdog=Watchdog())


def kept(one, step, most=None, **more):
    planned = SimpleNamespace(draw=SimpleNamespace(state=ORDER))
    resuming.keep(one, one.recipe.checkpoint.dir, step, planned.draw.state, more, most=most)
    return Path(one.recipe.checkpoint.dir, f"step{step + 1:08d}")


def changed(checkpoint, **state):
    """Write a checkpoint's manifest anew with other state."""
    listed = manifest.read(checkpoint)
    new = manifest.Manifest({**listed.state, **state}, listed.files)
    (checkpoint / manifest.NAME).write_text(json.dumps(new.to_json()))


def test_a_run_goes_on_with_what_was_kept_on_every_trainer(tmp_path, caplog):
    assert resuming.resume(job(tmp_path)) is None
    for step in (3, 7, 9):
        kept(job(tmp_path), step, refit=[step])
    one, beside = job(tmp_path), Host()
    state = resuming.resume(one, beside=[beside])
    assert (state["step"], state["order"], state["refit"], state["recipe"]) == (10, ORDER, [9], {"kept": "recipe"})
    assert one.host.loaded == beside.loaded == [tmp_path / "kept" / "step00000010" / "trainer"]
    assert sorted(path.name for path in (tmp_path / "kept").glob("step*")) == ["step00000008", "step00000010"]
    kept(one, 11, most=1)
    assert [path.name for path in (tmp_path / "kept").glob("step*")] == ["step00000012"]
    assert not caplog.records


def test_data_of_the_same_lengths_and_other_content_are_refused(tmp_path):
    kept(job(tmp_path), 1)
    one = job(tmp_path, "s")
    with pytest.raises(EvenloadError, match="the checkpoint was made with other data") as caught:
        resuming.resume(one)
    assert "step00000002 has samples of fingerprint" in caught.value.found
    assert one.host.loaded == [], "nothing is loaded that cannot go on"


def mixed(folder, **letters):
    """A job of domains, each rows of a letter."""
    one = job(folder)
    paths = {name: rows(folder / f"{name}.jsonl", letter) for name, letter in letters.items()}
    parts = {name: open_source(str(path), max_length=64) for name, path in paths.items()}
    one.source = MixedSource(parts) if parts else one.source
    return one


def test_domains_come_and_go_and_one_of_other_content_is_refused(tmp_path):
    kept(mixed(tmp_path, code="c", web="w"), 1)
    for letters in ({"code": "c"}, {"code": "c", "web": "w", "wiki": "i"}, {"wiki": "i"}):
        assert resuming.resume(mixed(tmp_path, **letters)) is not None
    one = mixed(tmp_path, code="c", web="x")
    with pytest.raises(EvenloadError, match="the checkpoint was made with other data") as caught:
        resuming.resume(one)
    assert "the domain web now gives" in caught.value.found
    assert one.host.loaded == []


def test_one_source_and_domains_do_not_go_on_from_each_other(tmp_path):
    kept(mixed(tmp_path, code="c"), 1)
    with pytest.raises(EvenloadError, match="not in the form of the recipe's") as caught:
        resuming.resume(job(tmp_path))
    assert caught.value.found == "step00000002 has domains, the recipe one source"
    kept(job(tmp_path), 2)
    with pytest.raises(EvenloadError, match="not in the form of the recipe's"):
        resuming.resume(mixed(tmp_path, code="c"))


def test_what_an_earlier_version_kept_goes_on_with_a_warning_unless_lengths_differ(tmp_path, caplog):
    one = job(tmp_path)
    changed(kept(one, 1), data=one.source.fingerprint.partition("-")[0])
    assert resuming.resume(job(tmp_path)) is not None
    assert "the data of the checkpoint step00000002: an earlier version kept their lengths alone" in caplog.text
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    longer = SimpleNamespace(**{**vars(one), "source": open_source(str(tmp_path / "data.jsonl"), max_length=64)})
    with pytest.raises(EvenloadError, match="other data"):
        resuming.resume(longer)
    changed(tmp_path / "kept" / "step00000002", data=None)
    with pytest.raises(EvenloadError, match="other data"):
        resuming.resume(job(tmp_path))


def test_a_checkpoint_without_an_order_is_refused(tmp_path):
    changed(kept(job(tmp_path), 1), order=None)
    one = job(tmp_path)
    with pytest.raises(EvenloadError, match="does not say which samples were trained on"):
        resuming.resume(one)
    assert one.host.loaded == []
