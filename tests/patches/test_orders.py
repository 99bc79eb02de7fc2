"""Every order of import, apply and undo on a stub host: all 155 sequences of up to three verbs, in full 780 of four.

H  import the host          S  import a script that does ``from host import f``
A  apply, lazily            E  apply, importing what is missing            U  undo
After every verb: each symbol is wrapped exactly once or is, by identity, the original; the import hook is on
``sys.meta_path`` exactly while a module is awaited.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import pytest
from harness.cases import only_full
from harness.orders import walk

VERBS = "HSAEU"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("longest", [3, only_full(4)])
def test_every_order_leaves_each_symbol_wrapped_once_or_original(longest: int, host_folder: Path, scripted) -> None:
    orders = ["".join(verbs) for verbs in itertools.product(VERBS, repeat=longest)]
    done = scripted("torch", host_folder, Path(__file__), host_folder, *orders)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.split() == orders


def _rows():
    from evenload.patches import Patch

    def row(target, **how):
        return Patch(name=target, target=f"stubhost.{target}", supports="stubhost >=1,<2", why="test", **how)

    def tenfold(wrapped, instance, args, kwargs):
        return 10 * wrapped(*args, **kwargs)

    functions = ("step", *(f"Engine.{name}" for name in ("run", "make", "build", "inherited")))
    return (
        *(row(target, wrapper=tenfold) for target in (*(f"core:{name}" for name in functions), "late:f")),
        row("core:math", replace=lambda _: "math"),
        row("core:TABLE[rate]", replace=lambda _: "fast"),
        row("core:gap", replace=lambda _: None, fills_gap=True),
    )


def _run(verb: str, ledger, finders: list) -> None:
    """Run a verb and compare the process with what the verbs so far should have made of it."""
    if verb in "HS":
        importlib.import_module({"H": "stubhost", "S": "stubscript"}[verb])
    elif verb == "U":
        ledger.undo()
    else:
        ledger.apply(_rows(), lazy=verb == "A")
    states = {status.state for status in ledger.table()}
    awaited = bool(states) and not {"stubhost.core", "stubhost.late"} <= sys.modules.keys()
    assert states or verb not in "AE"
    assert len(sys.meta_path) == len(finders) + awaited
    assert ("pending" in states) == awaited
    _look(on=bool(states))


def _look(on: bool) -> None:
    if core := sys.modules.get("stubhost.core"):
        engine, factor = core.Engine(), 10 if on else 1
        calls = [
            core.step,
            engine.run,
            engine.make,
            engine.build,
            engine.inherited,
            core.Engine.make,
            core.Engine.build,
        ]
        assert [call(1) for call in calls] == [2 * factor] * 7
        assert sys.modules["stubhost"].step is core.step
        assert core.TABLE["rate"] == ("fast" if on else "slow")
        assert hasattr(core, "gap") == on
        if not on:
            raw = vars(core.Engine)
            now = {"step": core.step, "math": core.math, **{key: raw[key] for key in ("run", "make", "build")}}
            assert all(now[key] is original for key, original in core.ORIGINALS.items())
            assert "inherited" not in raw
    if late := sys.modules.get("stubhost.late"):
        assert late.f(1) == (20 if on else 2)
        assert on or late.f is late.ORIGINALS["f"]
    if script := sys.modules.get("stubscript"):
        assert script.step is script.renamed is core.step
        assert script.f is late.f


if __name__ == "__main__":
    from evenload.patches import Ledger

    sys.path.insert(0, sys.argv[1])
    ledger, finders = Ledger(), list(sys.meta_path)
    sys.exit(not walk(sys.argv[2:], lambda verb: _run(verb, ledger, finders)))
