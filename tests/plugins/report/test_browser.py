"""The page in a real browser: nothing overlaps, nothing scrolls sideways, nothing is fetched, all is legible."""

import json

import numpy as np
import pytest
from evenload.api import load_recipe
from evenload.training.forecast.forecast import look_ahead
from evenload.training.pictures import draw
from harness.cases import only_full

pytestmark = pytest.mark.slow

RECIPE = """
model: {num_layers: 8}
parallel: {dp: 4}
train: {global_batch_size: 96, micro_batch_size: 2}
data: {max_length: 8192}
plugins: {packing: {enabled: true, max_tokens: 8192}}
"""

CHUNKS = [f"plugins.pipeline.{word}" for word in ("enabled=true", "max_tokens=8192", "split_backward=on")]

PAGES = {
    "dp": ([], 3),
    "pipeline": (["parallel.pp=4"], 1),
    "context": (["parallel.cp=2"], 1),
    "many": (["parallel.dp=96", "train.global_batch_size=960"], 1),
    "stock": (["plugins.packing.enabled=false", "train.recompute=true"], 1),
    "chunks": (
        ["parallel.dp=1", "parallel.pp=4", "train.global_batch_size=24", "plugins.packing.enabled=false", *CHUNKS],
        1,
    ),
    "small": (["parallel.dp=1", "train.global_batch_size=2"], 1),
}

SECTIONS = ["lengths", "step", "where", "bound", "memory", "table", "fine"]

COLLECT = """
const out = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const solid = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (colour && !colour.endsWith(', 0)')) return colour;
  }
  return null;
};
while (walker.nextNode()) {
  const node = walker.currentNode, owner = node.parentElement;
  if (!node.textContent.trim() || owner.closest('svg')) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  const chart = owner.closest('.spread, .panels, .bars');
  const inside = owner.closest('.in');
  const shape = inside && owner.closest('.plot').querySelector('rect.' + inside.classList[1]);
  const box = owner.closest('section, header').getBoundingClientRect();
  for (const rect of range.getClientRects()) {
    if (!rect.width) continue;
    out.push({
      text: node.textContent.trim(), left: rect.left, right: rect.right, top: rect.top, bottom: rect.bottom,
      chart: chart ? chart.closest('section').id : null, edge: [box.left, box.right],
      ink: getComputedStyle(owner).color, ground: shape ? getComputedStyle(shape).fill : solid(owner),
    });
  }
}
return out;
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "recipe.yaml").write_text(RECIPE)
    lengths = np.random.default_rng(0).lognormal(5.5, 1.3, 4000).astype(int) + 1
    (folder / "lengths.txt").write_text("\n".join(map(str, lengths)) + "\n")
    found = {}
    for name, (overrides, steps) in PAGES.items():
        recipe = load_recipe(folder / "recipe.yaml", overrides)
        found[name] = folder / f"{name}.html"
        draw(look_ahead(recipe, folder / "lengths.txt", steps, record=True), report=found[name])
    return found


def show(browser, page, width, scheme="light"):
    """Open the page; its texts with their boxes and colours."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(page.as_uri())
    texts = browser.execute_script(COLLECT)
    return texts


SIZES = [*((name, 390) for name in PAGES), ("dp", 1440), ("chunks", 1440)]
SIZES += [only_full(name, 1440) for name in PAGES if (name, 1440) not in SIZES]


@pytest.mark.parametrize(("name", "width"), SIZES)
def test_every_section_is_there_and_texts_and_shapes_stay_in_their_places(browser, pages, name, width):
    texts = show(browser, pages[name], width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert [t["text"] for t in texts if t["left"] < t["edge"][0] - 1 or t["right"] > t["edge"][1] + 1] == []
    for section in {t["chart"] for t in texts} - {None}:
        of_chart = [t for t in texts if t["chart"] == section]
        clashes = [
            (a["text"], b["text"])
            for place, a in enumerate(of_chart)
            for b in of_chart[place + 1 :]
            if min(a["right"], b["right"]) - max(a["left"], b["left"]) > 1
            and min(a["bottom"], b["bottom"]) - max(a["top"], b["top"]) > 2
        ]
        assert clashes == []
    heights = browser.execute_script(
        "return [...document.querySelectorAll('section')].map("
        "s => [s.id, s.checkVisibility() && s.getBoundingClientRect().height])"
    )
    assert [section for section, height in heights if height > 40] == SECTIONS
    outside = browser.execute_script(
        "return [...document.querySelectorAll('svg rect, svg path')].filter(shape => {"
        "  const a = shape.getBoundingClientRect(), b = shape.closest('svg').getBoundingClientRect();"
        "  return a.left < b.left - 1.5 || a.right > b.right + 1.5 || a.top < b.top - 1.5 || a.bottom > b.bottom + 1.5;"
        "}).map(shape => shape.outerHTML)"
    )
    assert outside == []
    widths = browser.execute_script(
        "return [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width)"
    )
    assert min(widths) > 0.4 * min(width, 800)


def test_nothing_is_fetched_and_nothing_is_complained_about(browser, pages):
    for page in pages.values():
        show(browser, page, 1440)
        events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
        assert browser.get_log("browser") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["dp", "stock", "chunks"])
def test_texts_stand_out_from_what_is_behind_them(browser, pages, name, scheme):
    texts = show(browser, pages[name], 1440, scheme)
    grounds = {t["ground"] for t in texts}
    assert any(luminance(g) < 0.05 for g in grounds) == (scheme == "dark")
    faint = [(t["text"], t["ink"], t["ground"]) for t in texts if contrast(t["ink"], t["ground"]) < 4.5]
    assert faint == []


def contrast(one, other):
    """WCAG 2 contrast ratio of two CSS colours."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    """Relative luminance of ``rgb(r, g, b)``."""
    values = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
