"""What every planned loop reports: its steps, a refusal, a loop that it leaves alone, and the end of a check.

Megatron's schedule, DeepSpeed's engine and Hugging Face's Trainer call the functions of this module, whoever switched
evenload on. `evenload run` and `evenload check` read what is left in their folder (`run_folder`); without one, and
outside check mode, a report costs nothing.

In check mode (PYTHON_EVENLOAD_CHECK=1) the first step is planned and run, rank 0 records what it is predicted to gain,
and all processes end before the optimizer's update: nothing is trained, and nothing is saved.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from ...core.errors import EvenloadError, RankError, RequestError
from ...core.plan.branches import COPIED
from ...core.plan.step_plan import StepPlan
from ...core.planning.chain import PlanChain
from ...core.planning.exercised import Exercised
from ...core.planning.gains import beside_stock, gains, own_step
from ...core.recipe.carried import CHECK, REQUIRE, carried_here
from .run_folder import Idle, RunFolder

log = logging.getLogger("evenload")

_steps: Counter[str] = Counter()
"""Planned steps of this process, by loop."""
_exercised = Exercised()
_idle: set[Idle] = set()
"""What this process has said of loops that it leaves alone."""
_releases: list[Callable[[], None]] = []
"""Of every module of loops that was loaded."""


def on_release(release: Callable[[], None]) -> Callable[[], None]:
    """Register what gives the live loops of a module back to their trainer; a decorator."""
    _releases.append(release)
    return release


def release_loops() -> None:
    """Give what live loops hold back to their trainers, for after the patch rows are off."""
    for release in _releases:
        release()


def report_step(
    loop: str,
    chain: PlanChain,
    plan: StepPlan,
    *,
    micro_batch_size: int | None = None,
    packed: StepPlan | None = None,
    loads: Sequence[Any] | None = None,
) -> None:
    """Leave word that this process has planned a step; every rank calls it, for each step.

    Args:
        loop: what its users call it: "Megatron-Core", "DeepSpeed", "Transformers' Trainer".
        chain: what planned it, with the costs of the live model.
        micro_batch_size: samples of a micro-batch of the loop's own, which the plan is compared with in check mode;
            None: the chain's.
        packed: the loop's own step, where its rows hold several samples each.
        loads: each `runtime.experts.gate.Load` of the step; None: not known here.
    """
    _steps[loop] += 1
    folder = RunFolder.of_process()
    if folder is None:
        return
    taken = None if loads is None else [COPIED for load in loads if load.copies]
    _exercised.note(chain, plan, taken, micro_batch_size, packed)
    folder.write_steps(_rank(), dict(_steps), _exercised.plugins)
    if _rank() == 0 and _steps.total() == 1:
        if is_checking():
            folder.write_record("check", {"loop": loop, **gains(chain, plan, micro_batch_size, packed)})
        else:
            with suppress(EvenloadError):  # a word about a step ends none
                stock = own_step(chain, plan, micro_batch_size, packed)
                _say_first(loop, chain, plan, stock, "in rows that are packed already, " if packed else "")


def _say_first(loop: str, chain: PlanChain, plan: StepPlan, stock: StepPlan, rows: str) -> None:
    """Say what is planned, and how to turn it off."""
    stock_s, plan_s = beside_stock(chain, plan, stock)
    recipe, plugins = carried_here(), ", ".join(plugin.name for plugin, _ in chain.links)
    costs = f" (costs={recipe.costs}, cluster={recipe.cluster})" if recipe else ""
    print(
        f"evenload: planned the first step of {loop} with {plugins}: {plan.num_padded_tokens:,} tokens instead of "
        f"{stock.num_padded_tokens:,}, {rows}predicted speedup {stock_s / plan_s:.2f}x{costs}. "
        "To turn evenload off, run the command without it.",
        file=sys.__stderr__,
        flush=True,
    )


def report_refusal(error: EvenloadError) -> None:
    """Print the message of an error that ends this process, unless a process of this machine has printed the same."""
    folder = RunFolder.of_process()
    if folder is None or folder.write_refusal(error):
        # torch.distributed's hook puts sys.stderr aside while ours runs, and would lose what a process that ends says.
        print(f"evenload: {error}", file=sys.__stderr__, flush=True)


def report_idle(loop: str, why: str, do: str) -> None:
    """Say that a loop was recognised and runs as it is; every rank calls it. Ends a check.

    Args:
        loop: what its users call it.
        why: what keeps evenload from planning it.
        do: the line to change.

    Raises RequestError where plans are required (``evenload run --require``).
    """
    if os.environ.get(REQUIRE) == "1":
        raise RequestError(f"nothing is planned in {loop}, and --require asks for plans", why, do)
    idle = Idle(loop, why, do)
    if idle not in _idle:
        _idle.add(idle)
        if folder := RunFolder.of_process():
            folder.write_idle(idle)
        if _rank() == 0:
            log.warning("nothing is planned in %s: %s; %s", loop, why, do)
    end_of_check()


def end_of_check() -> None:
    """End this process in check mode with exit code 0, and do nothing outside it. Collective: all ranks are here, right
    before the optimizer's update of the first step."""
    if is_checking():
        end_together()


def end_together() -> NoReturn:
    """End this process with exit code 0. Collective."""
    if (distributed := _distributed()) is not None:
        distributed.barrier()
        distributed.destroy_process_group()
    _end_process(0)


def watch_process() -> None:
    """For the startup of `evenload run`'s processes: an `EvenloadError` that ends one is printed as one message for the
    machine, and a check ends before any of torch's optimizers updates a weight, whatever loop calls it."""
    sys.excepthook = partial(_end_with_message, sys.excepthook)
    if is_checking():
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(_end_before_update)


def _end_before_update(*_: Any) -> None:
    if not _steps and not _idle:
        why = "no loop that evenload knows has reached a step before the first update"
        report_idle("this script", why, "see docs/support.md for the loops that are planned")
    end_of_check()


def _end_with_message(
    previous: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: Any
) -> None:
    """`sys.excepthook`: an `EvenloadError` without its traceback and with the command line's exit code. A process with
    other ranks ends at once: at its exit it could wait for ranks that wait for it."""
    if not isinstance(error, EvenloadError):
        previous(kind, error, trace)
        return
    report_refusal(error)
    code = 1 if isinstance(error, RankError) else 2
    if _distributed() is not None:
        _end_process(code)
    raise SystemExit(code)


def _end_process(code: int) -> NoReturn:
    """End this process and its workers without anything that scripts or libraries do at exit."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code)


def is_checking() -> bool:
    """Whether this process takes one planned step and ends before its update."""
    return os.environ.get(CHECK) == "1"


def _distributed() -> Any:
    module: Any = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def _rank() -> int:
    distributed = _distributed()
    return int(os.environ.get("RANK", "0")) if distributed is None else int(distributed.get_rank())
