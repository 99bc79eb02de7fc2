"""A job on two hosts that are far apart, lose each other, or are unlike: what it says, when it ends, what it lost.

    python benchmarks/faults/two_hosts.py [--launcher srun|torchrun] [--only TEXT] [--json] [--out FILE]   (as root)

The hosts are network namespaces of this machine, each with its own home, cache and temporary files and a wire between
them that is slow, lossy or cut (`hosts/wire.py`). One rank each trains six steps of a tiny model, with a
checkpoint every other step on a disk that both see. Where a case ends the job, the same command is given again on both,
and every sample and loss of the six steps is compared with those of a run that nothing disturbed.

seconds        from the fault to the end of the last rank on a host that still runs
launcher       to the end of what the launcher started there: torchrun's agent waits for a silent store
said           the first message
lost, twice    samples, over all six steps
apart          the largest difference of a loss
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.benchmarks.frame import columns, main, options

sys.path += [str(Path(__file__).with_name(folder)) for folder in ("drill", "hosts")]
from jobs import AHEAD_S, Job
from runs import CONVERTED, Row, Steps, compared, messages_of, steps_of
from wire import Quality, Wire

FAULT_AFTER = 3
"""Steps; the last good checkpoint has two."""
LATE_S = 12.0
PERFECT = Quality()


CORPUS = "corpus.jsonl"


@dataclass(frozen=True)
class Case:
    """What is unlike or happens, and how the job is to end."""

    name: str
    happens: Callable[[Job], float | None]
    """Begins the job, does the fault, and says when that was; None where the job is to train to its end."""
    quality: Quality = PERFECT
    other: tuple[tuple[str, str], ...] = ()
    """Environment of the second host."""
    overrides: tuple[str, ...] = ()
    is_refused: bool = False
    """Before the first step."""
    resumes_on: tuple[int, ...] = (0, 1)
    rounding: float = 0.0


def begin(job: Job) -> None:
    for host in (0, 1):
        job.start(host)


def undisturbed(job: Job) -> None:
    begin(job)


def shares_a_cache(job: Job) -> None:
    """With nothing in it: one host writes, the other waits or reads."""
    job.env = ({"EVENLOAD_CACHE": str(job.place / "cache")}, {"EVENLOAD_CACHE": str(job.place / "cache")})
    begin(job)


def has_other_data(job: Job) -> None:
    """A file of the same name and size in either host's own folder."""
    for host in (0, 1):
        folder = job.place / f"host{host}"
        folder.mkdir()
        rows = [json.dumps({"text": ("ab", "cd")[host] * (20 + number)}) for number in range(60)]
        (folder / CORPUS).write_text("\n".join(rows) + "\n")
    begin(job)


def joins_late(job: Job) -> None:
    job.start(0)
    time.sleep(LATE_S)
    job.start(1)


def _after_steps(job: Job) -> None:
    patience = time.monotonic() + 90
    while len(steps_of(job.place / "log.jsonl")) < FAULT_AFTER and time.monotonic() < patience:
        time.sleep(0.005)


def dies(host: int, without_power: bool) -> Callable[[Job], float]:
    """The processes of a host are killed; without power its network is silent, too."""

    def happening(job: Job) -> float:
        begin(job)
        _after_steps(job)
        job.wire.quality = Quality(is_cut=without_power)
        job.kill(host)
        return time.monotonic()

    return happening


def is_cut(job: Job) -> float:
    begin(job)
    _after_steps(job)
    job.wire.quality = Quality(is_cut=True)
    return time.monotonic()


CASES = (
    Case("nothing", undisturbed),
    Case("20 ms one way, 1 % lost", undisturbed, Quality(delay_s=0.02, loss=0.01)),
    Case(f"the second host comes {LATE_S:.0f} s late", joins_late),
    Case("the second host's clock is an hour ahead", undisturbed, other=(("CLOCK_AHEAD_S", str(AHEAD_S)),)),
    Case("the second host's files open 0.3 s late", undisturbed, other=(("SLOW_WRITES_S", "0.3"),)),
    Case("one empty cache on a disk of both", shares_a_cache),
    Case("the second host has other data", has_other_data, overrides=(f"data.source={CORPUS}",), is_refused=True),
    Case("the second host's processes are killed", dies(1, without_power=False)),
    Case("the second host loses power", dies(1, without_power=True)),
    Case("the first host loses power", dies(0, without_power=True)),
    Case("the wire is cut", is_cut),
    Case(
        "the second host loses power for good",
        dies(1, without_power=True),
        resumes_on=(0,),
        rounding=CONVERTED,
    ),
)


def run(case: Case, launcher: str, wire: Wire, place: Path, wanted: Steps) -> Row:
    """One case, and the same command again where it ended."""
    wire.quality = case.quality
    job = Job(wire, place, launcher, case.overrides, env=({}, dict(case.other)))
    begun_s = time.monotonic()
    fault_s = case.happens(job)
    codes = job.wait()
    dead = [host for host in job.started if codes[host] is not None and codes[host] < 0]
    said = [message for host in (0, 1) if host not in dead for message in messages_of(job.output(host))]
    since_s = fault_s or begun_s
    ranks_s, agents_s = (
        max((ended[host] - since_s for host in ended if host not in dead), default=None)
        for ended in (job.seen_s, job.ended_s)
    )
    row: Row = {
        "case": case.name,
        "codes": codes,
        "seconds": ranks_s and round(ranks_s, 1),
        "launcher_s": agents_s and round(agents_s, 1),
        "messages": said,
        "text": job.output(0) + job.output(1) if case.is_refused else "",
        "resumed": None,
    }
    if fault_s is not None:
        wire.quality = PERFECT
        fewer = ("parallel.dp=1",) if len(case.resumes_on) == 1 else ()
        again = Job(wire, place, launcher, fewer, hosts=case.resumes_on)
        for host in case.resumes_on:
            again.start(host)
        row["resumed"] = again.wait()
    steps = steps_of(place / "log.jsonl")
    row |= {"steps": len(steps), **compared(steps, {} if case.is_refused else wanted or steps)}
    row["faults"] = faults_of(case, row, fault_s is not None)
    row["output"] = "\n".join(job.output(host)[-3000:] for host in (0, 1)) if row["faults"] else ""
    return row


def faults_of(case: Case, row: Row, ends: bool) -> list[str]:
    """What is not as it should be."""
    codes = [code for code in row["codes"].values() if code is None or code >= 0]
    checks = [(None in codes, "a host did not end"), (row["lost"] > 0, "samples lost")]
    checks += [
        (row["repeated"] > 0, "samples repeated"),
        (row["steps"] != (0 if case.is_refused else 6), f"{row['steps']} steps"),
    ]
    checks += [((row["loss_apart"] or 0.0) > case.rounding, "losses differ")]
    if case.is_refused:
        checks += [
            (not set(codes) <= {1, 2}, f"exit codes {codes}"),
            ("evenload: " not in row["text"], "nothing was said"),
        ]
    elif ends:
        checks += [(0 in codes, "a host ended with code 0"), (not row["messages"], "nothing was said")]
        checks += [(set(row["resumed"].values()) != {0}, f"resumed with {row['resumed']}")]
    else:
        checks += [(codes != [0, 0], f"exit codes {codes}"), (bool(row["messages"]), "a message")]
    return [text for wrong, text in checks if wrong]


def table(data: dict[str, Any]) -> Any:
    def said(row: Row) -> str:
        return row["messages"][0].splitlines()[0].removeprefix("evenload: ") if row["messages"] else "-"

    cells = {
        "case": "{case}",
        "first message": said,
        **{head: lambda row, key=key: row[key] for head, key in (("seconds", "seconds"), ("launcher", "launcher_s"))},
        "lost": "{lost}",
        "twice": "{repeated}",
        "apart": lambda row: row["loss_apart"],
        "not as it should be": lambda row: ", ".join(row["faults"]) or "-",
    }
    wrong = sum(bool(row["faults"]) for row in data["cases"])
    return columns("two hosts", data["cases"], cells, f"{wrong} not as they should be")


def benchmark(asked: Any) -> dict[str, Any]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="evenload-hosts-") as folder, Wire() as wire:
        wanted: Steps = {}
        for number, case in enumerate(CASES):
            if number and asked.only not in case.name:
                continue
            place = Path(folder) / f"case{number}"
            place.mkdir()
            rows.append(run(case, asked.launcher, wire, place, wanted))
            wanted = wanted or steps_of(place / "log.jsonl")
            print(f"{rows[-1]['seconds']} s  {case.name}: {rows[-1]['faults'] or 'fine'}", file=sys.stderr)
            shutil.rmtree(place)
    return {"cases": rows}


if __name__ == "__main__":
    main(options(__doc__, launcher=("srun", "torchrun"), only=""), benchmark, table)
