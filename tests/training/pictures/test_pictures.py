"""The pictures of a plan: a trace of every span, a page whose numbers are the plan's, a plot that is not blank."""

import gzip
import json
import re
import shlex
import sys
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from evenload.api import load_recipe
from evenload.core.errors import EvenloadError
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.simulate.step import SPAN_KINDS, Span
from evenload.training import pictures
from evenload.training.forecast.forecast import look_ahead
from evenload.training.pictures import plot, trace
from evenload.training.pictures.facts import facts_of, histogram, parts_of, pieces_of, shown_places
from evenload.training.pictures.planners import names, planners
from evenload.training.pictures.report import page_of
from evenload.training.pictures.trace import tracks_of
from harness.cases import only_full

RECIPE = """
model: {num_layers: 8}
parallel: {dp: 4}
train: {global_batch_size: 48, micro_batch_size: 2}
data: {max_length: 2048}
plugins: {packing: {enabled: true, max_tokens: 4096}}
"""

LAYOUTS = {
    "dp": [],
    "pp": ["parallel.pp=4"],
    "cp": ["parallel.cp=2"],
    "stock": ["plugins.packing.enabled=false"],
    "recompute": ["train.recompute=true"],
    "zero3": ["trainer=deepspeed", "deepspeed.zero_stage=3"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "recipe.yaml").write_text(RECIPE)
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 2000).astype(int) + 1
    (folder / "lengths.txt").write_text("\n".join(map(str, lengths)) + "\n")
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def forecast(request, place):
    recipe = load_recipe(place / "recipe.yaml", LAYOUTS[request.param])
    return look_ahead(recipe, place / "lengths.txt", 2, record=True)


@pytest.fixture(scope="module")
def simple(place):
    return look_ahead(load_recipe(place / "recipe.yaml"), place / "lengths.txt", 1, record=True)


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


class Page(HTMLParser):
    """What a report holds: its numbers, its tables, its tags, its text."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.numbers = defaultdict(list)
        self.rows = defaultdict(dict)
        self.text = defaultdict(str)
        self._section, self._table, self._row, self._open = "head", "", "", []
        self._names_row = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append((tag, values))
        self._open.append(tag)
        self._names_row = tag == "th" and values.get("scope") == "row"
        if tag == "section":
            self._section = values["id"] or ""
        elif tag == "table":
            self._table = values["id"] or ""
        elif tag == "data":
            value = float(values["value"] or "nan")
            self.numbers[self._section].append(value)
            if self._table and self._row:
                self.rows[self._table][self._row].append(value)

    def handle_endtag(self, tag):
        while self._open.pop() != tag:
            pass
        self._names_row = False
        if tag == "table":
            self._table, self._row = "", ""

    def handle_data(self, data):
        self.text[self._section] += data
        if self._names_row:
            self._row = data
            self.rows[self._table][data] = []


def test_the_numbers_of_the_page_are_those_of_json(forecast):
    result = forecast.to_json()["steps"]
    page = Page(page_of(forecast))
    mean = {"evenload": np.mean([s["step_s"] for s in result])}
    mean |= {
        n.replace("_", " "): np.mean([s["baselines"][n]["step_s"] for s in result]) for n in result[0]["baselines"]
    }
    mean["stock"] = mean.pop("padded")
    rows = page.rows["planners"]
    remapped = bool(forecast.chain.links)
    assert set(rows) == (set(mean) if remapped else {"stock"})
    for name in rows:
        assert rows[name][0] == pytest.approx(mean[name], rel=1e-12)
        assert rows[name][1] == pytest.approx(mean[name] / mean["evenload"], rel=1e-12)
    if remapped:
        assert rows["evenload"][2] == pytest.approx(np.mean([s["imbalance"] for s in result]))
        assert rows["evenload"][4] == pytest.approx(np.mean([s["bubble_frac"] for s in result]))
        assert rows["evenload"][5] == pytest.approx(np.mean([s["exposed_frac"] for s in result]))
        assert rows["evenload"][6] == max(s["peak_bytes"] for s in result)
        assert page.numbers["head"][:3] == pytest.approx(
            [mean["evenload"], mean["stock"], mean["stock"] / mean["evenload"]], rel=1e-12
        )
    assert page.numbers["bound"][0] == pytest.approx(np.mean([s["bound_s"] for s in result]))
    first = page.rows["steps"]["step 0"]
    assert first[-1] == result[0]["plan_s"]
    assert first[-2] == result[0]["bound_s"]
    assert first[0] == result[0]["step_s"]


def test_the_page_asks_for_nothing_and_says_that_it_is_predicted(forecast):
    text = page_of(forecast)
    page = Page(text)
    assert [v["id"] for t, v in page.tags if t == "section"] == [
        "lengths", "step", "where", "bound", "memory", "table", "fine"
    ]  # fmt: skip
    assert not {"script", "img", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        assert not {"src", "srcset", "onload", "onclick", "xlink:href"} & set(attributes), tag
        assert attributes.get("href") in (None, "data:,")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "(predicted, mean of 2 steps)" in page.text["head"]
    assert "except the time that planning took" in page.text["fine"]
    assert "$" not in re.sub(r"<dd>.*?</dd>", "", text)


def test_strings_of_users_are_escaped(simple, monkeypatch):
    evil = "<script>alert('x')</script>&\"$body"
    context = simple.chain.context
    costs = context.costs.model_copy(update={"source": evil})
    cluster = context.cluster.model_copy(update={"name": evil, "source": evil})
    chain = replace(simple.chain, context=replace(context, costs=costs, cluster=cluster))
    monkeypatch.setattr(sys, "argv", ["evenload", "plan", evil])
    text = page_of(replace(simple, chain=chain))
    assert "<script" not in text
    page = Page(text)
    assert page.text["fine"].count(evil) == 3
    assert shlex.quote(evil) in page.text["fine"]
    assert evil in page.text["head"]


def test_the_parts_of_a_step_are_the_step(forecast):
    context = forecast.chain.context
    for name in names(forecast):
        one = planners(forecast.steps[0])[name]
        parts = parts_of(one, context)
        assert sum(parts.values()) == pytest.approx(one.outcome.step_s)
        assert all(taken >= 0 for taken in parts.values())
        computed = parts["forward"] + parts["backward"] + parts["again"] + parts["padding"]
        assert computed == pytest.approx(one.outcome.busy_s.mean())
        assert (parts["again"] > 0) == context.costs.recompute or one.plan.replayed
    stock = parts_of(forecast.steps[0].baselines["padded"], context)
    assert stock["padding"] > 0
    assert parts_of(forecast.steps[0].ours, context)["padding"] <= stock["padding"]


def test_padding_is_what_the_pass_costs_more_than_its_tokens(simple):
    costs = simple.chain.context.costs
    one = simple.steps[0].baselines["padded"]
    bare = replace(one.plan, micro_batches=tuple(m._replace(pad_to=0) for m in one.plan.micro_batches))
    wanted = sum(
        sum(costs.micro_batch_s(m)) - sum(costs.micro_batch_s(b))
        for m, b in zip(one.plan.micro_batches, bare.micro_batches, strict=True)
    )
    assert parts_of(one, simple.chain.context)["padding"] == pytest.approx(wanted / one.plan.limits.num_ranks)


def test_pieces_cover_a_ranks_spans_in_order(forecast):
    one = forecast.steps[0].baselines["padded"]
    stage = one.plan.limits.num_stages - 1
    pieces = pieces_of(one, forecast.chain.context.costs, {(stage, 1)})[stage, 1]
    spans = [s for s in one.outcome.spans if (s.stage, s.rank) == (stage, 1)]
    assert sum(p.end_s - p.start_s for p in pieces) == pytest.approx(sum(s.end_s - s.start_s for s in spans))
    assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(pieces))


def test_of_many_ranks_the_busiest_and_the_idlest_are_among_those_shown(simple):
    one = simple.steps[0].baselines["in_order"]
    assert shown_places(one) == ([(0, 0), (0, 1), (0, 2), (0, 3)], True)
    places, complete = shown_places(one, 3)
    ranks = [rank for _, rank in places]
    busy = one.outcome.busy_s.sum(axis=0)
    assert not complete
    assert (busy[ranks[0]], busy[ranks[-1]]) == (busy.max(), busy.min())
    assert len(set(ranks)) == 3


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [1, 2, 1024], [3, 32768], [32769]])
def test_every_sequence_is_in_one_bin(lengths):
    edges, shares = histogram(np.array(lengths))
    assert edges[0] <= min(lengths)
    assert edges[-1] >= max(lengths)
    assert all(sum(share) == pytest.approx(1) for share in shares.values())


def test_the_rival_is_the_fastest_but_stock_and_the_first_of_equals(simple):
    facts = facts_of(simple)
    one = facts.others[0]
    fake = [replace(one, name=n, step_s=s) for n, s in (("padded", 1.0), ("a", 3.0), ("b", 2.0), ("c", 2.0 - 1e-6))]
    found = replace(facts, others=tuple(fake)).rival
    assert found.name == "b"


@pytest.mark.parametrize(
    "forecast", ["dp", "pp", *map(only_full, ("cp", "stock", "recompute", "zero3"))], indirect=True
)
def test_the_plot_decodes_and_shows_the_colours_of_work_and_waiting(forecast, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    colors = pytest.importorskip("matplotlib.colors")
    pictures.draw(forecast, plot=tmp_path / "p.png")
    pixels = image.imread(tmp_path / "p.png")
    assert pixels.shape[1] > 1000
    for part in ("forward", "backward", "waiting"):
        wanted = np.array(colors.to_rgb(plot._COLOURS[part]))
        assert (np.abs(pixels[..., :3] - wanted).max(axis=-1) < 0.01).sum() > 500, part


@pytest.mark.parametrize(
    ("option", "name", "says"),
    [
        ("trace", "t.txt", "end its name with .json"),
        ("plot", "p.svg", "end its name with .png"),
        ("report", "r.pdf", "end its name with .html"),
        ("report", "no/such/r.html", "mkdir -p"),
        ("trace", "folder.json", "no regular file"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_any_other_is(simple, tmp_path, option, name, says):
    (tmp_path / "folder.json").mkdir()
    before = sorted(tmp_path.rglob("*"))
    good = {"trace": tmp_path / "a.json", "plot": tmp_path / "a.png", "report": tmp_path / "a.html"}
    with pytest.raises(EvenloadError, match=re.escape(says)) as caught:
        pictures.draw(simple, **{**good, option: tmp_path / name})
    assert f"--{option}" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_without_matplotlib_only_the_plot_is_refused(simple, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EvenloadError, match="pip install matplotlib"):
        pictures.draw(simple, plot=tmp_path / "p.png", report=tmp_path / "r.html")
    assert not list(tmp_path.iterdir())
    pictures.draw(simple, trace=tmp_path / "t.json", report=tmp_path / "r.html")
    assert len(list(tmp_path.iterdir())) == 2


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
