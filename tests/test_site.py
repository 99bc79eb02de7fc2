"""The documents as web pages (`make site`): each opens under its own title, reachable and searchable, on any screen."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import evenload
import pytest

ROOT = Path(evenload.__file__).parent
SITE = ROOT / "build" / "site"
PAGES = sorted(path.relative_to(SITE) for path in SITE.rglob("*.html"))

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PAGES, reason="`make site` builds the pages")]

OVER_THE_EDGE = """
const edge = document.documentElement.clientWidth;
const scrolls = (node) => node && (getComputedStyle(node).overflowX !== 'visible' || scrolls(node.parentElement));
const isOver = (node) => node.getBoundingClientRect().width && node.getBoundingClientRect().right > edge + 1;
const over = [...document.body.querySelectorAll('*')].filter((node) => isOver(node) && !scrolls(node.parentElement));
return [innerWidth, document.documentElement.scrollWidth > innerWidth, over.map((node) => node.outerHTML.slice(0, 80))];
"""


def test_no_page_is_wider_than_the_screen(browser: Any) -> None:
    size, wide = {"height": 900, "deviceScaleFactor": 1, "mobile": False}, {}
    for page in PAGES:
        browser.get((SITE / page).as_uri())
        for width in (390, 1440):
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, **size})
            shown, scrolls, over = browser.execute_script(OVER_THE_EDGE)
            assert shown == width
            if scrolls or over:
                wide[f"{page}, {width}"] = over[:3]
    assert not wide
    assert len(PAGES) > 20


def test_every_page_of_the_tree_opens_under_its_own_title_and_is_reached_and_searched() -> None:
    documents = [path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    assert {path.with_suffix(".html") for path in documents} <= {*PAGES}, "`make site` again"
    start = (SITE / "index.html").read_text()
    search = (SITE / "searchindex.js").read_text().removeprefix("Search.setIndex(").rstrip()
    index = json.loads(search.removesuffix(")"))
    for path in documents:
        title = (ROOT / "docs" / path).with_suffix(".md").read_text().splitlines()[0].removeprefix("# ")
        heading = re.search(r"<h1>(.*?)</h1>", (SITE / path).with_suffix(".html").read_text(), re.DOTALL)
        assert heading is not None, path
        shown = unescape(re.sub(r"<a class=\"headerlink\".*|<[^>]*>", "", heading[1])).strip()
        assert shown.replace("\u2019", "'") == title.replace("`", ""), path
        assert str(path) == "index" or f'href="{path}.html"' in start
        assert str(path) in index["docnames"]
