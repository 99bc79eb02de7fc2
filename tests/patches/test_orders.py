"""Every order of import, apply and undo on a stub host: 155 sequences of up to three verbs, in full 780 of up to four.

A verb runs in a fork of the process that has run those before it, so that no sequence sees another.

H  import the host          S  import a script that does ``from host import f``
A  apply, lazily            E  apply, importing what is missing            U  undo
After every verb: each symbol is wrapped exactly once or is, by identity, the original; the import hook is on
``sys.meta_path`` exactly while a module is awaited.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

VERBS = "HSAEU"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("longest", "orders"), [(3, 155), pytest.param(4, 780, marks=pytest.mark.full)])
def test_every_order_leaves_each_symbol_wrapped_once_or_original(longest: int, orders: int, host_folder: Path) -> None:
    command = [sys.executable, __file__, str(host_folder), str(longest)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.split() == [str(orders), "orders"]


def _rows():
    from evenload.patches import Patch

    def tenfold(wrapped, instance, args, kwargs):
        return 10 * wrapped(*args, **kwargs)

    supports = "stubhost >=1,<2"
    targets = ("core:step", "core:Engine.run", "core:Engine.make", "core:Engine.build", "core:Engine.inherited")
    return (
        *(
            Patch(name=target, target=f"stubhost.{target}", supports=supports, why="test", wrapper=tenfold)
            for target in (*targets, "late:f")
        ),
        Patch(name="math", target="stubhost.core:math", supports=supports, why="test", replace=lambda _: "math"),
        Patch(name="t", target="stubhost.core:TABLE[rate]", supports=supports, why="test", replace=lambda _: "fast"),
        Patch(
            name="gap",
            target="stubhost.core:gap",
            supports=supports,
            why="test",
            replace=lambda _: None,
            fills_gap=True,
        ),
    )


def _run(verb: str, ledger, on: bool, finders: list) -> bool:
    """Run a verb and compare the process with what the verbs so far should have made of it; whether rows are on."""
    import importlib

    if verb in "HS":
        importlib.import_module({"H": "stubhost", "S": "stubscript"}[verb])
    elif verb in "AE":
        ledger.apply(_rows(), lazy=verb == "A")
        on = True
    else:
        ledger.undo()
        on = False
    awaited = on and not {"stubhost.core", "stubhost.late"} <= sys.modules.keys()
    assert len(sys.meta_path) == len(finders) + awaited
    states = {status.state for status in ledger.table()}
    assert ("pending" in states) == awaited
    _look(on)
    return on


def _look(on: bool) -> None:
    if core := sys.modules.get("stubhost.core"):
        engine, factor = core.Engine(), 10 if on else 1
        calls = (
            core.step,
            engine.run,
            engine.make,
            engine.build,
            core.Engine.make,
            core.Engine.build,
            engine.inherited,
        )
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


def _walk(order: str, longest: int, ledger, on: bool, finders: list, ran: int) -> bool:
    """Whether every sequence that goes on from this one survives; each that has run is a byte in the pipe ``ran``."""
    good = True
    for verb in VERBS:
        child = os.fork()
        if child == 0:
            try:
                now = _run(verb, ledger, on, finders)
                os.write(ran, b".")
                below = len(order) + 1 == longest or _walk(order + verb, longest, ledger, now, finders, ran)
                os._exit(0 if below else 1)
            except BaseException:
                print(f"order {order + verb}", flush=True)
                traceback.print_exc()
                os._exit(1)
        good &= os.waitpid(child, 0)[1] == 0
    return good


if __name__ == "__main__":
    from evenload.patches import Ledger  # once, before the forks

    sys.path.insert(0, sys.argv[1])
    end, ran = os.pipe()
    good = _walk("", int(sys.argv[2]), Ledger(), False, list(sys.meta_path), ran)
    print(len(os.read(end, 1 << 16)), "orders", flush=True)
    sys.exit(not good)
