"""No page loses the test of what it claims: every page with figures has rows in ``claims``, and every row holds."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from claims import CLAIMS, NONE_OF_OURS, WITHOUT_A_TEST

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PLACES = (ROOT / "docs").rglob("*.md"), (ROOT / "benchmarks" / "results").glob("*.md")
PAGES = [
    str(page.relative_to(ROOT)) for page in (ROOT / "README.md", *sorted(page for place in PLACES for page in place))
]

CODE = re.compile(r"^```.*?^```|^ {4}.*?$|`[^`]*`", re.DOTALL | re.MULTILINE)
CLAIMED = re.compile(r"\d ?x\b|\d %|\de-\d|\d (?:us|ms|s|[MG]iB)\b|\bexact(?:ly|ness)?\b")
"""A ratio, a share, an error, seconds, bytes; or that something is exact."""


@cache
def text_of(page: str) -> str:
    """A page with single spaces, as words are quoted from it."""
    return " ".join((ROOT / page).read_text().split())


@cache
def names_of_tests(file: str) -> set[str]:
    """Names of the test functions of a file below ``tests``, those of its classes as ``Class::test``."""
    found: set[str] = set()
    for node in ast.parse((TESTS / file).read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {
            prefix + one.name
            for one in inside
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name.startswith("test_")
        }
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_page_that_claims_something_has_a_test_for_it(page: str) -> None:
    claims = bool(CLAIMED.search(CODE.sub("", (ROOT / page).read_text())))
    held = page in {claim.page for claim in CLAIMS}
    assert held or not claims or page in NONE_OF_OURS, "state its claims in tests/claims.py"
    assert page not in NONE_OF_OURS or (claims and not held), "it needs no reason in tests/claims.py"


def test_words_stand_in_their_pages() -> None:
    quoted = [(claim.page, claim.words) for claim in CLAIMS] + [*WITHOUT_A_TEST]
    assert not [(page, words) for page, words in quoted if page not in PAGES or words not in text_of(page)]
    assert not [page for page in NONE_OF_OURS if page not in PAGES]


def test_tests_of_claims_exist() -> None:
    lost = []
    for claim in CLAIMS:
        file, _, name = claim.test.partition("[")[0].partition("::")
        if not (TESTS / file).is_file() or name not in names_of_tests(file):
            lost.append(claim)
    assert not lost, "renamed or merged: name the test that holds the words now"


def test_no_claim_stands_twice() -> None:
    rows = Counter((claim.page, claim.words) for claim in CLAIMS) + Counter(WITHOUT_A_TEST)
    assert not [row for row, times in rows.items() if times > 1]
