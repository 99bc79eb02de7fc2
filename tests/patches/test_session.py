"""Switching on and off: one session at a time, every symbol back by identity, in every order of the verbs."""

from __future__ import annotations

import importlib
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from evenload.api import load_plugins, load_recipe
from evenload.core.errors import EvenloadError
from evenload.core.recipe.traits import TRAINERS
from evenload.integrations.host.versions import listed_version
from evenload.integrations.unmodified import planned_runs
from evenload.patches import Patch, megatron, session
from evenload.patches.cpu_bridge import no_triton
from evenload.patches.import_hook import ImportHook
from evenload.patches.row import is_needed_by_version
from evenload.patches.wrapping import PatchedFunction
from harness.cases import only_full
from harness.orders import walk
from packaging.version import Version

RECIPE = "trainer: deepspeed\nplugins: {packing: {enabled: true, max_tokens: 64}}\n"
STUB = {"step": "stubhost.core:step", "run": "stubhost.core:Engine.run", "late": "stubhost.late:f"}


def tenfold(wrapped, instance, args, kwargs):
    return 10 * wrapped(*args, **kwargs)


class Stub:
    """A trainer's rows for the stub host."""

    released = 0

    @staticmethod
    def rows(recipe):
        assert recipe.enabled()
        supports = "stubhost >=1,<2"
        return tuple(
            Patch(name=name, target=target, supports=supports, why="test", wrapper=tenfold)
            for name, target in STUB.items()
        )

    @classmethod
    def release(cls):
        cls.released += 1


STUBBED = replace(TRAINERS["deepspeed"], patches=("stubpatches",))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def stub(host, monkeypatch):
    monkeypatch.setitem(sys.modules, "stubpatches", Stub)
    monkeypatch.setitem(TRAINERS, "deepspeed", STUBBED)
    monkeypatch.setattr(planned_runs, "_releases", [Stub.release])
    monkeypatch.setattr(Stub, "released", 0)
    yield importlib.import_module("stubhost.core")
    session.disable()


def test_enable_and_disable_by_path_and_by_recipe(stub, path):
    for recipe in (path, str(path), load_recipe(path)):
        on = session.enable(recipe)
        assert on.active
        assert stub.step(1) == 20
        assert {s.row.name: s.state for s in on.table()} == {"step": "applied", "run": "applied", "late": "pending"}
        on.disable()
        assert not on.active
        assert stub.step is stub.ORIGINALS["step"]
        assert vars(stub.Engine)["run"] is stub.ORIGINALS["run"]
    assert Stub.released == 3


def test_a_second_enable_names_the_first(stub, path):
    with session.enabled(path) as first:
        with pytest.raises(EvenloadError, match="switched on already") as refused:
            session.enable(load_recipe(path))
        assert str(path) in refused.value.found
        assert "deepspeed: packing" in refused.value.found
        assert first.active
    assert not first.active
    assert stub.step is stub.ORIGINALS["step"]


def test_disabling_what_is_off_does_nothing(stub, path):
    session.disable()
    first = session.enable(path)
    session.disable()
    with session.enabled(path) as second:
        first.disable()
        assert second.active
        assert stub.step(1) == 20
    assert Stub.released == 2


def test_the_block_ends_the_session_when_it_raises(stub, path):
    with pytest.raises(RuntimeError, match="training failed"), session.enabled(path):
        raise RuntimeError("training failed")
    assert stub.step is stub.ORIGINALS["step"]


def test_a_strangers_wrapper_keeps_the_session_on(stub, path):
    on = session.enable(path)
    ours, stub.step = stub.step, lambda value: value
    with pytest.raises(EvenloadError, match="somebody has changed"):
        session.disable()
    assert on.active
    assert Stub.released == 0
    assert stub.Engine().run(1) == 20
    stub.step = ours
    session.disable()
    assert stub.step is stub.ORIGINALS["step"]


def test_a_failing_enable_leaves_nothing(stub, path, monkeypatch):
    bad = Patch(name="bad", target="stubhost.core:gone", supports="stubhost >=1", why="test", wrapper=tenfold)
    rows = Stub.rows
    monkeypatch.setattr(Stub, "rows", staticmethod(lambda recipe: (*rows(recipe), bad)))
    with pytest.raises(EvenloadError, match="gone does not exist"):
        session.enable(path)
    assert stub.step is stub.ORIGINALS["step"]
    monkeypatch.setattr(Stub, "rows", rows)
    with session.enabled(path):
        assert stub.step(1) == 20


def test_a_wrong_recipe_switches_nothing_on(stub, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("plugins: {pakcing: {}}\n")
    with pytest.raises(EvenloadError, match="pakcing"):
        session.enable(wrong)
    assert session._session is None


# Every order, in processes of their own. H: import the host, S: import a script that copies its names, E and D.


@pytest.mark.parametrize("longest", [3, only_full(4)])
def test_every_order_on_a_stub_host(longest, host_folder, path, scripted):
    orders = ["".join(verbs) for verbs in itertools.product("HSED", repeat=longest)]
    orders = [f"{order}D" for order in orders if "EE" not in order.replace("H", "").replace("S", "")]
    _survive(scripted, "stub", orders, host_folder, path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [False, only_full(True)])
def test_orders_on_the_real_megatron(every, tmp_path, scripted):
    (tmp_path / "userscript.py").write_text(
        "from megatron.core.pipeline_parallel import get_forward_backward_func\n"
        "from megatron.core.pipeline_parallel.schedules import get_forward_backward_func as renamed\n"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("deepspeed", "megatron"))
    # Without Triton newer versions cannot be imported before the bridge is there.
    alone = not no_triton() or Version(listed_version("megatron-core") or "0") < Version("0.18")
    orders = ["ESDED", "EDSD", *(["HESDED", "HSED"] if alone else [])]
    _survive(scripted, "megatron", orders if every else orders[:1], tmp_path, path)


def _survive(scripted, host: str, orders: list[str], folder: Path, recipe: Path) -> None:
    done = scripted("torch", folder, Path(__file__), host, folder, recipe, *orders)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ran = [word for word in done.stdout.split() if set(word) <= set("HSED")]
    assert sorted(ran) == sorted(orders)


def _run(verb: str, host: str, recipe: str, originals: dict) -> None:
    """Run a verb and look at every row's symbol after it."""
    main, script = {"stub": ("stubhost.core", "stubscript"), "megatron": ("megatron.core", "userscript")}[host]
    if verb in "HS":
        importlib.import_module(main if verb == "H" else script)
    elif verb == "E":
        _look(originals)
        session.enable(recipe)
    else:
        session.disable()
        assert not any(isinstance(finder, ImportHook) for finder in sys.meta_path)
    _look(originals)


def _targets() -> dict[str, str]:
    if TRAINERS["deepspeed"] is STUBBED:
        return STUB
    return {row.name: row.target for row in megatron.rows() if is_needed_by_version(row)}


def _raw(target: str):
    """The raw value of a row's symbol; None while its module is not loaded. Imports nothing."""
    module, _, path = target.partition(":")
    holder = sys.modules.get(module)
    for part in path.split("."):
        holder = None if holder is None else vars(holder)[part]
    return holder


def _look(originals: dict) -> None:
    """While a session is on all symbols are patched, else they are the originals, by identity."""
    on = session._session is not None
    for name, target in _targets().items():
        value = _raw(target)
        if value is None:
            continue
        assert isinstance(value, PatchedFunction) == on, f"{target} is {value}"
        bare = value.__wrapped__ if on else value
        assert not isinstance(bare, PatchedFunction)
        assert bare is originals.setdefault(name, bare)
    if user := sys.modules.get("userscript"):
        schedules = sys.modules["megatron.core.pipeline_parallel.schedules"]
        package = sys.modules["megatron.core.pipeline_parallel"]
        copies = (user.get_forward_backward_func, user.renamed, package.get_forward_backward_func)
        assert all(copy is schedules.get_forward_backward_func for copy in copies)
    if user := sys.modules.get("stubscript"):
        assert user.step is user.renamed is sys.modules["stubhost.core"].step
        assert user.f is sys.modules["stubhost.late"].f


if __name__ == "__main__":
    name, folder, recipe_path, *all_orders = sys.argv[1:]
    sys.path.insert(0, folder)
    load_plugins()
    if name == "stub":
        sys.modules["stubpatches"] = Stub  # type: ignore[assignment]
        TRAINERS["deepspeed"] = STUBBED
    found: dict = {}
    sys.exit(not walk(all_orders, lambda verb: _run(verb, name, recipe_path, found)))
