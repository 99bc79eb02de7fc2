"""The documents as web pages (`make site`), on a telephone and on a desk: nothing has to be scrolled sideways."""

from __future__ import annotations

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
    assert len(PAGES) > 50


def test_the_pages_are_those_of_the_documents() -> None:
    documents = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert documents <= {*PAGES}, "`make site` again"
