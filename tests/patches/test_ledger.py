"""The engine on a stub host: guards, rollback, exact undo, strangers, copies, import hook, pickling."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import logging
import pickle
import subprocess
import sys

import pytest
from evenload.core.errors import EvenloadError
from evenload.patches import Ledger, Patch
from evenload.patches.import_hook import ImportHook

SUPPORTS = "stubhost >=1,<2"


def tenfold(wrapped, instance, args, kwargs):
    return 10 * wrapped(*args, **kwargs)


def row(target: str = "core:step", name: str = "r", **given) -> Patch:
    if "replace" not in given:
        given.setdefault("wrapper", tenfold)
    return Patch(**{"name": name, "target": f"stubhost.{target}", "supports": SUPPORTS, "why": "test", **given})


@pytest.fixture
def core(host):
    return importlib.import_module("stubhost.core")


@pytest.fixture
def ledger():
    ledger = Ledger()
    yield ledger
    ledger.undo()


def states(ledger: Ledger) -> list[tuple[str, str]]:
    return [(status.row.name, status.state) for status in ledger.table()]


# Guards


@pytest.mark.parametrize("supports", ["stubhost >=2", "stubhost <1.2", "stubhost ==1.1.*"])
@pytest.mark.parametrize("lazy", [False, True])
def test_an_unsupported_version_is_refused_before_anything_is_imported(host, ledger, supports, lazy):
    with pytest.raises(EvenloadError) as refused:
        ledger.apply([row(supports=supports)], lazy=lazy)
    assert "patch 'r'" in refused.value.what
    assert supports in refused.value.what
    assert refused.value.found == "stubhost 1.2.0"
    assert "pip install 'stubhost" in refused.value.do
    assert "stubhost" not in sys.modules


ABSENT = [
    *(({"target": f"core:{name}"}, f"core:{name} does not exist") for name in ("gone", "Gone.run", "Engine.gone")),
    ({"supports": "absenthost >=1"}, "absenthost is not installed"),
]


@pytest.mark.parametrize(
    ("how", "said", "lazy"),
    [
        *((*one, lazy) for one in ABSENT for lazy in (False, True)),
        ({"target": "nowhere:f"}, r"stubhost\.nowhere cannot be imported", False),
    ],
)
def test_what_is_missing_is_named_and_nothing_waits(core, ledger, how, said, lazy):
    finders = list(sys.meta_path)
    with pytest.raises(EvenloadError, match=said):
        ledger.apply([row("late:f", name="late"), row(**how)], lazy=lazy)
    assert sys.meta_path == finders
    assert ledger.table() == ()


@pytest.mark.parametrize("target", ["core:step", "core:Engine.run", "core:Engine.make", "core:Engine.build"])
def test_a_changed_signature_is_shown(core, ledger, target):
    with pytest.raises(EvenloadError, match="no longer takes chunks, plan") as refused:
        ledger.apply([row(target, expects=("value", "chunks", "plan"))])
    assert "value" in refused.value.found
    assert "stubhost 1.2.0" in refused.value.found
    assert ledger.table() == ()


def test_a_signature_with_the_expected_names_is_accepted_and_kept(core, ledger):
    before = inspect.signature(core.step)
    ledger.apply([row(expects=("value", "scale"))])
    assert inspect.signature(core.step) == before
    assert core.step.__wrapped__ is core.ORIGINALS["step"]


def _wrapped_by_someone(step):
    @functools.wraps(step)
    def louder(value, scale=1):
        return 2 * step(value, scale)

    return louder


@pytest.mark.parametrize(
    ("change", "who"),
    [
        (_wrapped_by_someone, f"{__name__}._wrapped_by_someone.<locals>.louder ("),
        (lambda step: functools.partial(step, scale=2), "functools.partial "),
    ],
    ids=["wraps", "partial"],
)
def test_a_symbol_with_an_owner_that_someone_has_patched_is_refused_by_his_name(core, ledger, change, who):
    core.step = theirs = change(core.step)
    with pytest.raises(EvenloadError, match="already patched by someone else") as refused:
        ledger.apply([row(owner="stubhost", reach=())])
    assert refused.value.found.startswith(who)
    assert core.step is theirs
    ledger.apply([row(reach=())])
    assert core.step(1) == 40


def test_a_symbol_with_an_owner_may_be_wrapped_by_evenload_before(core, ledger):
    ledger.apply([row(name="a", owner="stubhost"), row(name="b", owner="stubhost")])
    assert core.step(1) == 200


def test_a_row_that_is_not_needed_is_skipped_whatever_the_version(core, ledger):
    def on_mondays() -> bool:
        return False

    ledger.apply([row(when=on_mondays, supports="absenthost >=9")])
    assert [(s.state, s.note) for s in ledger.table()] == [("skipped", "not needed here: on_mondays is false")]
    assert core.step is core.ORIGINALS["step"]


# All or nothing


@pytest.mark.parametrize(
    "bad", [{"target": "core:gone"}, {"target": "core:twin", "expects": ("lost",)}, {"replace": lambda _: 1 / 0}]
)
def test_a_failing_row_takes_the_rows_before_it_back(core, ledger, bad):
    ledger.apply([row("core:twin", name="earlier call")])
    good = [row(), row("core:Engine.make", name="static"), row("core:Engine.inherited", name="inherited")]
    with pytest.raises((EvenloadError, ZeroDivisionError)):
        ledger.apply([*good, row("late:f", name="late"), row(name="bad", **bad)])
    assert core.step is core.ORIGINALS["step"]
    assert vars(core.Engine)["make"] is core.ORIGINALS["make"]
    assert "inherited" not in vars(core.Engine)
    assert states(ledger) == [("earlier call", "applied")]
    assert core.twin(1) == 10
    ledger.apply(good)
    assert core.step(1) == 20


def test_a_lazy_row_that_fails_undoes_the_ledger_and_fails_the_import(core, ledger):
    ledger.apply([row(), row("late:gone", name="late")], lazy=True)
    assert states(ledger) == [("r", "applied"), ("late", "pending")]
    with pytest.raises(EvenloadError, match=r"stubhost\.late:gone does not exist"):
        importlib.import_module("stubhost.late")
    assert core.step is core.ORIGINALS["step"]
    assert ledger.table() == ()
    assert importlib.import_module("stubhost.late").f(1) == 2


# Never twice


def test_a_row_given_twice_or_applied_again_wraps_once(core, ledger):
    ledger.apply([row(), row()])
    ledger.apply([row()])
    assert core.step(1) == 20
    assert states(ledger) == [("r", "applied")]


def test_a_row_held_by_another_ledger_is_not_applied_again(core, ledger):
    other = Ledger()
    ledger.apply([row()])
    other.apply([row()])
    assert core.step(1) == 20
    assert [(s.state, s.note) for s in other.table()] == [("skipped", "already held by another ledger of this process")]
    other.undo()
    assert core.step(1) == 20
    ledger.undo()
    other.apply([row()])
    assert core.step(1) == 20
    other.undo()
    assert core.step is core.ORIGINALS["step"]


def test_two_rows_on_one_symbol_stack_and_come_off_in_reverse(core, ledger):
    def plus_one(wrapped, instance, args, kwargs):
        return 1 + wrapped(*args, **kwargs)

    ledger.apply([row(), row(name="plus", wrapper=plus_one)])
    script = importlib.import_module("stubscript")
    assert script.step(1) == 21
    ledger.undo()
    assert script.step is core.step is core.ORIGINALS["step"]


def test_a_gap_that_upstream_has_closed_is_left_alone(core, ledger):
    ledger.apply([row("core:step", replace=lambda _: None, fills_gap=True)])
    assert core.step is core.ORIGINALS["step"]
    assert [(s.state, s.note) for s in ledger.table()] == [("skipped", "stubhost.core:step is there already")]


# Undo


def test_undo_beneath_a_strangers_wrapper_is_refused_and_names_it(core, ledger):
    ledger.apply([row(), row("core:Engine.run", name="method"), row("late:f", name="late")], lazy=True)
    ours = core.step

    @functools.wraps(ours)
    def strangers_step(*args, **kwargs):
        return ours(*args, **kwargs)

    core.step = strangers_step
    with pytest.raises(EvenloadError, match=r"somebody has changed stubhost\.core:step since") as refused:
        ledger.undo()
    assert "strangers_step" in refused.value.found
    assert __file__ in refused.value.found
    assert core.Engine().run(1) == 20, "a refused undo must change nothing"
    assert states(ledger) == [("r", "applied"), ("method", "applied"), ("late", "pending")]
    core.step = ours
    ledger.undo()
    assert core.step is core.ORIGINALS["step"]


def test_undo_beneath_another_ledger_is_refused_and_names_its_patch(core, ledger):
    ledger.apply([row()])
    with Ledger() as above:
        above.apply([row(name="above")])
        with pytest.raises(EvenloadError, match="patch 'above' of another evenload ledger"):
            ledger.undo()
    ledger.undo()
    assert core.step is core.ORIGINALS["step"]


def test_a_stranger_on_a_copy_counts_too_and_a_deleted_copy_does_not(core, ledger):
    package, script = importlib.import_module("stubhost"), importlib.import_module("stubscript")
    ledger.apply([row()])
    ours = package.step
    package.step = print
    with pytest.raises(EvenloadError, match="stubhost:step"):
        ledger.undo()
    package.step = ours
    del script.renamed
    ledger.undo()
    assert package.step is script.step is core.step is core.ORIGINALS["step"]
    assert not hasattr(script, "renamed")


# Copies made by ``from module import name``


def test_stale_copies_are_rebound_listed_and_put_back(core, ledger, caplog):
    script = importlib.import_module("stubscript")
    with caplog.at_level(logging.WARNING):
        ledger.apply([row()])
    assert script.step is script.renamed is core.step
    assert "stubscript:step, stubscript:renamed" in caplog.text
    assert "stubhost:step" not in caplog.text, "the host's own re-exports are no surprise"
    assert {"stubhost:step", "stubscript:step"} <= set(ledger.table()[0].note.split(", "))
    ledger.undo()
    assert script.step is script.renamed is core.step is core.ORIGINALS["step"]


@pytest.mark.parametrize(("reach", "expected"), [(("stubhost",), (10, 1)), ((), (1, 1)), (None, (10, 10))])
def test_reach_limits_which_copies_are_rebound(core, ledger, reach, expected):
    package, script = importlib.import_module("stubhost"), importlib.import_module("stubscript")
    ledger.apply([row(reach=reach)])
    assert (package.step(0), script.step(0)) == expected
    assert core.step(0) == 10


def test_a_declared_reexport_must_be_the_symbol(core, ledger):
    with pytest.raises(EvenloadError, match=r"stubhost:Engine is no longer stubhost\.core:step"):
        ledger.apply([row(aliases=("stubhost:Engine",))])
    with pytest.raises(EvenloadError, match="stubhost:gone does not exist"):
        ledger.apply([row(aliases=("stubhost:gone",))])
    assert core.step is core.ORIGINALS["step"]


def test_a_declared_reexport_that_is_still_being_imported_is_patched_by_its_own_import(host, ledger):
    ledger.apply([row(aliases=("stubhost:step",))], lazy=True)
    assert importlib.import_module("stubhost").step(1) == 20


# The import hook


def test_a_spec_found_while_waiting_runs_plainly_after_undo(host, ledger):
    ledger.apply([row("late:f")], lazy=True)
    spec = importlib.util.find_spec("stubhost.late")
    ledger.undo()
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.f is module.ORIGINALS["f"]


def test_a_cancelled_hook_never_calls_back(host):
    called = []
    hook = ImportHook(called.append)
    for _ in range(2):
        hook.watch("stubhost.late")
        spec = importlib.util.find_spec("stubhost.late")
        hook.cancel("stubhost.late")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    importlib.import_module("stubhost.late")
    assert called == []


def test_an_awaited_module_keeps_its_own_loader_and_source_and_asking_for_it_is_not_importing_it(host, ledger):
    ledger.apply([row("late:f")], lazy=True)
    assert importlib.util.find_spec("stubhost.late") is not None
    assert states(ledger) == [("r", "pending")]
    late = importlib.import_module("stubhost.late")
    assert type(late.__loader__).__name__ == "SourceFileLoader"
    assert late.__spec__.loader is late.__loader__
    assert late.f(1) == 20
    assert "def f" in inspect.getsource(late)


def test_a_module_whose_body_fails_stays_awaited(host, ledger):
    (host / "stubhost" / "late.py").write_text("raise OSError('busy')\n")
    ledger.apply([row("late:f")], lazy=True)
    with pytest.raises(OSError, match="busy"):
        importlib.import_module("stubhost.late")
    assert states(ledger) == [("r", "pending")]
    (host / "stubhost" / "late.py").write_text("def f(value): return value + 1  # repaired\n")
    importlib.invalidate_caches()
    assert importlib.import_module("stubhost.late").f(1) == 20


def test_two_ledgers_may_wait_for_one_module(host, ledger):
    with Ledger() as other:
        ledger.apply([row("late:f")], lazy=True)
        other.apply([row("late:f", name="other", wrapper=lambda w, i, a, k: 1 + w(*a, **k))], lazy=True)
        late = importlib.import_module("stubhost.late")
        assert late.f(1) in (21, 30)
        first, second = (other, ledger) if late.f(1) == 21 else (ledger, other)
        first.undo()
        second.undo()
    assert late.f is late.ORIGINALS["f"]


# Manners of the wrapper


def test_a_wrapped_function_is_copied_as_itself_and_pickled_by_name(core, ledger):
    ledger.apply([row(), row("core:Engine.run", name="method")])
    assert copy.deepcopy({"hook": core.step})["hook"] is copy.copy(core.step) is core.step
    assert pickle.loads(pickle.dumps(core.step)) is core.step
    assert pickle.loads(pickle.dumps(core.Engine().run))(1) == 20
    frozen = pickle.dumps(core.step)
    ledger.undo()
    assert pickle.loads(frozen) is core.ORIGINALS["step"], "another process finds the symbol as its own import has it"


def test_methods_see_their_instance(core, ledger):
    seen = []

    def watch(wrapped, instance, args, kwargs):
        seen.append(instance)
        return wrapped(*args, **kwargs)

    ledger.apply([row(f"core:Engine.{name}", name=name, wrapper=watch) for name in ("run", "make", "build")])
    engine = core.Engine()
    engine.run(1), core.Engine.make(1), core.Engine.build(1)
    assert seen == [engine, None, core.Engine]


@pytest.mark.slow
def test_the_engine_needs_no_torch():
    code = "import sys, evenload.patches.support as s; s.document(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
