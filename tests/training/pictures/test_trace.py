"""The trace of a plan: every span, in the format that viewers read."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.simulate.step import SPAN_KINDS, Span
from evenload.training import pictures
from evenload.training.pictures import trace
from evenload.training.pictures.trace import tracks_of

from .forecasts import LAYOUTS, forecast_in


@pytest.fixture(scope="module", params=LAYOUTS)
def forecast(request, tmp_path_factory):
    return forecast_in(tmp_path_factory.mktemp("pictures"), request.param, 2)


@pytest.fixture(scope="module")
def simple(tmp_path_factory):
    return forecast_in(tmp_path_factory.mktemp("pictures"))


def read_trace(path):
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found = json.loads(text)
    return found


def test_a_trace_shows_every_span_of_every_planner_once(forecast, tmp_path):
    pictures.draw(forecast, trace=tmp_path / "t.json")
    found = read_trace(tmp_path / "t.json")
    processes = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"]
    assert processes[:2] == ["evenload, predicted", "stock, predicted"]
    pid_of = {e["args"]["name"]: e["pid"] for e in found["traceEvents"] if e["name"] == "process_name"}
    for track_name, pid in pid_of.items():
        threads = {
            e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name" and e["pid"] == pid
        }
        drawn = sorted(
            (threads[e["tid"]], e["name"], round(1e3 * e["ts"]))
            for e in found["traceEvents"]
            if e["ph"] == "X" and e["pid"] == pid and threads[e["tid"]] != "step"
        )
        wanted = []
        for track in (t for t in tracks_of(forecast) if t.name == track_name):
            for span in track.spans:
                stages = track.plan.limits.num_stages
                thread = f"stage {span.stage}, rank {span.rank}" if stages > 1 else f"rank {span.rank}"
                number = f" {span.micro_batch}" if span.micro_batch >= 0 else ""
                wanted.append((thread, SPAN_KINDS[span.kind] + number, round(1e9 * (track.begin_s + span.start_s))))
        assert drawn == sorted(wanted)
    assert not list(tmp_path.glob(".*")), "the unfinished file is gone"


def test_events_of_a_thread_never_overlap_and_hold_what_the_format_asks_for(forecast, tmp_path):
    pictures.draw(forecast, trace=tmp_path / "t.json.gz")
    found = read_trace(tmp_path / "t.json.gz")
    assert set(found) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    assert found["otherData"]["times"] == "predicted"
    threads = defaultdict(list)
    named = set()
    arrows = defaultdict(list)
    for event in found["traceEvents"]:
        assert {"ph", "pid", "tid", "name"} <= set(event)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
            named.add((event["pid"], event["tid"]))
            continue
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
            continue
        assert event["ph"] == "X"
        assert event["dur"] >= 0
        threads[event["pid"], event["tid"]].append((round(1e3 * event["ts"]), round(1e3 * event["dur"])))
    assert set(threads) <= named
    assert len({tid for _, tid in threads}) == len(threads), "thread ids are unique over processes"
    for leaves, arrives in arrows.values():
        assert (leaves["ph"], arrives["ph"], arrives["bp"]) == ("s", "f", "e")
        assert leaves["ts"] <= arrives["ts"]
        assert (leaves["name"], leaves["cat"], leaves["pid"]) == (arrives["name"], arrives["cat"], arrives["pid"])
    assert bool(arrows) == (forecast.chain.limits.num_stages > 1)
    for events in threads.values():
        events.sort()
        assert all(start + length <= after for (start, length), (after, _) in pairwise(events))


def test_the_args_of_a_pass_describe_its_micro_batch(tmp_path):
    batch = as_lengths([6, 2, 8])
    packs = (MicroBatch((Slice(0, 0, 6), Slice(1, 0, 2)), (0,), pad_to=6), MicroBatch((Slice(2, 0, 8),), (0, 1)))
    spans = [
        Span(0, 0, "F", 0, 0.0, 1.0),
        Span(0, 0, "F", 1, 1.0, 2.0),
        Span(0, 0, "C", 1, 2.0, 2.5),
        Span(0, 0, "G", -1, 2.5, 3.0),
    ]
    plan = StepPlan(batch, packs, Limits(2, 16), made_by="hand")
    trace.write_trace(tmp_path / "t.json", [trace.Track("one", plan, spans, 10.0)], {"who": Path("x")})
    found = read_trace(tmp_path / "t.json")
    events = {e["name"]: e for e in found["traceEvents"] if e["ph"] == "X"}
    assert found["otherData"] == {"who": "x", "ranks shown": "all ranks"}
    assert events["forward 0"]["args"] == {
        "micro-batch": 0, "tokens": 8, "slices": 2, "longest slice": 6, "padding": round(1 - 8 / 12, 4)
    }  # fmt: skip
    assert events["forward 1"]["args"]["on ranks"] == 2
    assert events["exposed communication 1"]["args"] == events["forward 1"]["args"]
    assert "args" not in events["gradient sum"]
    assert (events["forward 1"]["ts"], events["forward 1"]["dur"]) == (11e6, 1e6)
    assert (events["step 0"]["ts"], events["step 0"]["dur"]) == (10e6, 3e6)
    assert events["step 0"]["args"]["made by"] == "hand"


def test_a_communication_after_a_backward_is_of_the_backwards_micro_batch(tmp_path):
    batch = as_lengths([4, 6])
    forward = (MicroBatch((Slice(0, 0, 4),), (0,)), MicroBatch((Slice(1, 0, 6),), (0,)))
    plan = StepPlan(batch, forward, Limits(1, 16), backward=forward[::-1])
    spans = [Span(0, 0, "F", 0, 0, 1), Span(0, 0, "C", 0, 1, 2), Span(0, 0, "B", 0, 2, 3), Span(0, 0, "C", 0, 3, 4)]
    trace.write_trace(tmp_path / "t.json", [trace.Track("one", plan, spans)], {})
    tokens = [
        e["args"]["tokens"]
        for e in read_trace(tmp_path / "t.json")["traceEvents"]
        if e.get("cat") in SPAN_KINDS.values()
    ]
    assert tokens == [4, 4, 6, 6]


def test_a_trace_with_too_many_events_says_which_ranks_it_shows(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trace, "MOST_EVENTS", 10)
    batch = as_lengths([1] * 30)
    plan = StepPlan(batch, tuple(MicroBatch((Slice(i, 0, 1),), (i,)) for i in range(30)), Limits(30, 1))
    spans = [Span(0, r, "F", r, 0.0, 2.0 if r == 7 else 1.0) for r in range(30)]
    trace.write_trace(tmp_path / "t.json", [trace.Track("one", plan, spans)], {})
    found = read_trace(tmp_path / "t.json")
    ranks = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"} - {"step"}
    assert ranks == {f"rank {r}" for r in (*range(0, 30, 3), 7)}
    assert "rank 0, 3, 6" in found["otherData"]["ranks shown"]
    assert "rank 0, 3, 6" in caplog.text


def test_a_failure_half_way_leaves_the_old_file(simple, tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    path.write_text("old")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace, "_meta", full)
    with pytest.raises(EvenloadError, match="No space left"):
        trace.write_trace(path, tracks_of(simple), {})
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    assert path.read_text() == "old"
