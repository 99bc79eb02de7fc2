"""The pictures of a plan: a page whose numbers are the plan's, a plot that is not blank."""

import re
import shlex
import sys
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.plugins.report import plot
from evenload.plugins.report.facts import facts_of, histogram, parts_of, pieces_of, shown_places
from evenload.plugins.report.page import page_of
from evenload.training import pictures
from evenload.training.pictures.planners import names, planners
from harness.cases import only_full

from ...training.pictures.forecasts import LAYOUTS, forecast_in


@pytest.fixture(scope="module", params=LAYOUTS)
def forecast(request, tmp_path_factory):
    return forecast_in(tmp_path_factory.mktemp("pictures"), request.param, 2)


@pytest.fixture(scope="module")
def simple(tmp_path_factory):
    return forecast_in(tmp_path_factory.mktemp("pictures"))


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
        ("trace", "folder.json", "not a regular file"),
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
