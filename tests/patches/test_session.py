"""Switching on and off: one session at a time, every symbol back by identity, in every order of the verbs."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import subprocess
import sys
import traceback
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
        assert {(s.row.name, s.state) for s in on.table()} == {
            ("step", "applied"),
            ("run", "applied"),
            ("late", "pending"),
        }
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


@pytest.mark.slow
@pytest.mark.parametrize("longest", [3, pytest.param(4, marks=pytest.mark.full)])
def test_every_order_on_a_stub_host(longest, host_folder, path):
    """And some of those that are longer by a verb."""
    orders = ["".join(verbs) for n in range(1, longest + 1) for verbs in itertools.product("HSED", repeat=n)]
    longer = ["".join(verbs) for verbs in itertools.product("HSED", repeat=longest + 1)]
    orders += random.Random(0).sample(longer, 20 if longest == 3 else 100)
    _survive("stub", [o for o in orders if "EE" not in o.replace("H", "").replace("S", "")], host_folder, path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_orders_on_the_real_megatron(every, tmp_path):
    (tmp_path / "userscript.py").write_text(
        "from megatron.core.pipeline_parallel import get_forward_backward_func\n"
        "from megatron.core.pipeline_parallel.schedules import get_forward_backward_func as renamed\n"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("deepspeed", "megatron"))
    # Without Triton newer versions cannot be imported before the bridge is there.
    alone = not no_triton() or Version(listed_version("megatron-core") or "0") < Version("0.18")
    orders = ["ESDED", "HESDED", "EDS", "HSED"] if alone else ["ESDED", "ESD"]
    _survive("megatron", orders if every else orders[:1], tmp_path, path)


def _survive(host: str, orders: list[str], folder: Path, recipe: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, host, str(folder), str(recipe), *orders],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.split()[-2:] == [str(len(orders)), "orders"]


def _run(host: str, recipe: str, order: str) -> None:
    """Run the verbs one by one and look at every row's symbol after each."""
    main, script = {"stub": ("stubhost.core", "stubscript"), "megatron": ("megatron.core", "userscript")}[host]
    on, originals = False, {}
    for verb in order:
        if verb in "HS":
            importlib.import_module(main if verb == "H" else script)
        elif verb == "E":
            if not on:
                _remember(originals)
            session.enable(recipe)
            on = True
        else:
            session.disable()
            on = False
        _look(originals, on)
    session.disable()
    _look(originals, on=False)
    assert not any(isinstance(finder, ImportHook) for finder in sys.meta_path)


def _targets() -> dict[str, str]:
    if TRAINERS["deepspeed"] is STUBBED:
        return STUB
    return {row.name: row.target for row in megatron.rows() if is_needed_by_version(row)}


def _raw(target: str):
    """The raw value of a row's symbol; None while its module is not loaded. Imports nothing."""
    module, _, path = target.partition(":")
    holder = sys.modules.get(module)
    *parents, name = path.split(".")
    for part in parents:
        holder = None if holder is None else vars(holder)[part]
    return None if holder is None else vars(holder)[name]


def _remember(originals: dict) -> None:
    for name, target in _targets().items():
        if (value := _raw(target)) is not None:
            originals.setdefault(name, value)


def _look(originals: dict, on: bool) -> None:
    from evenload.patches.wrapping import PatchedFunction

    for name, target in _targets().items():
        value = _raw(target)
        if value is None:
            continue
        assert isinstance(value, PatchedFunction) == on, f"{target} is {value}"
        if on:
            assert value.__wrapped__ is originals.setdefault(name, value.__wrapped__)
            assert not isinstance(value.__wrapped__, PatchedFunction)
        else:
            assert value is originals.setdefault(name, value)
    if user := sys.modules.get("userscript"):
        schedules = sys.modules["megatron.core.pipeline_parallel.schedules"]
        package = sys.modules["megatron.core.pipeline_parallel"]
        copies = (user.get_forward_backward_func, user.renamed, package.get_forward_backward_func)
        assert all(copy is schedules.get_forward_backward_func for copy in copies)
    if user := sys.modules.get("stubscript"):
        assert user.step is user.renamed is sys.modules["stubhost.core"].step
        assert user.f is sys.modules["stubhost.late"].f


def _survives(host: str, recipe: str, order: str) -> bool:
    child = os.fork()
    if child == 0:
        try:
            _run(host, recipe, order)
            os._exit(0)
        except BaseException:
            print(f"order {order}", flush=True)
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    name, folder, recipe_path, *all_orders = sys.argv[1:]
    sys.path.insert(0, folder)
    load_plugins()
    if name == "stub":
        sys.modules["stubpatches"] = Stub  # type: ignore[assignment]
        TRAINERS["deepspeed"] = STUBBED
    else:
        import torch  # noqa: F401  # once, before the forks
    failed = [order for order in all_orders if not _survives(name, recipe_path, order)]
    print(*failed, len(all_orders), "orders")
    sys.exit(bool(failed))
