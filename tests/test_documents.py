"""Documents say what is so: paths and links lead somewhere, figures are the benchmarks', walks follow the code."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import evenload
import pytest

ROOT = Path(evenload.__file__).parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(RESULTS.glob("*.md"))]
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
GONE = re.compile(r"\b(gangs?|homes|lanes?|plane_rank|num_slots|situation)\b")
"""Words that others have replaced."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_page_takes_the_place_of_one_of_the_site() -> None:
    """Sphinx writes these itself, over what is there."""
    assert not {"search", "genindex", "py-modindex"} & {page.stem for page in PAGES if page.parent.name == "docs"}


@pytest.mark.parametrize("page", ALL, ids=name)
def test_a_page_fits_the_screen(page: Path) -> None:
    assert not [line for line in page.read_text().splitlines() if len(line) > 120]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_opens_with_what_it_gives(page: Path) -> None:
    paragraph = page.read_text().split("\n\n")[1]
    assert re.match(r"(This page gives|These pages give) ", paragraph), paragraph


@pytest.mark.parametrize("page", ALL, ids=name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    paths = re.findall(r"`([\w./]+/[\w./]+\.(?:py|md|yaml|json|sh))`", text)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s:]+)\)", text) if not link.startswith("#")]
    assert not [path for path in paths if not ((ROOT / path).exists() or (page.parent / path).exists())]
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", ALL, ids=name)
def test_names_that_a_page_imports_are_there(page: Path) -> None:
    for module, names in re.findall(r"^from (evenload[\w.]*) import ([\w, ]+)$", page.read_text(), re.MULTILINE):
        assert not [n for n in names.split(", ") if not hasattr(import_module(module), n.strip())]


@pytest.mark.parametrize("page", [p for p in ALL if p.name != "log.md"], ids=name)
def test_a_page_uses_the_words_of_today(page: Path) -> None:
    lines = [line for line in page.read_text().splitlines() if GONE.search(re.sub(r"`[^`]*`", "", line))]
    assert not lines


def test_documents_stay_short() -> None:
    """One page in front, and no more than an afternoon of reading after it."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.stem not in ("index", "log")]
    assert len(pages) <= 28
    assert sum(len(page.read_text().split()) for page in pages) <= 59_000


def test_figures_of_the_readme_stand_on_a_page_of_results() -> None:
    """All of a row on one page that names its script or recipe."""
    evidence = (ROOT / "README.md").read_text().partition("## Evidence")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*`.*) \| 20[\d-]+ \| (.*\|.*) \|$", evidence, re.MULTILINE)
    assert len(rows) > 4
    pages = [page.read_text() for folder in ("docs", "benchmarks") for page in (ROOT / folder).rglob("*.md")]
    numbers = [(page, list(map(float, re.findall(r"\d+\.\d+", page)))) for page in pages]
    for command, figures in rows:
        script = re.findall(r"\w+\.(?:py|yaml)|(?<=bench )\w+", command)[0]
        shown = list(map(float, re.findall(r"\d+\.\d+", figures)))
        assert shown
        assert any(
            script in page and all(min(abs(figure - one) for one in there) < 0.00501 for figure in shown)
            for page, there in numbers
            if there
        ), command


@pytest.mark.parametrize("walk", ["to the kernel", "to its plan", "to its samples"])
def test_a_walk_follows_the_code(walk: str) -> None:
    """Each function is in its file and uses the name that the next row is reached by."""
    section = (ROOT / "docs" / "architecture.md").read_text().partition(walk)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/.]+)` \| `(\w+)` \| `(\w+)` \|$", section, re.MULTILINE)
    assert 4 < len(rows) <= 8
    for path, function, callee in rows:
        tree = ast.parse((ROOT / path).read_text())
        bodies = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
        assert bodies, f"{path} has no {function}"
        nodes = [node for body in bodies for node in ast.walk(body)]
        used = {n.id for n in nodes if isinstance(n, ast.Name)} | {
            n.attr for n in nodes if isinstance(n, ast.Attribute)
        }
        assert callee in used, f"{function} of {path} does not use {callee}"


def test_every_room_stands_in_the_tree() -> None:
    """Each folder of the product that holds modules is in the table of docs/architecture.md, or its parent is."""
    tree = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Six")[0]
    named = set(re.findall(r"`([\w/<>]+)/`", tree))
    floors = ("commands", "core", "data", "integrations", "patches", "plugins", "runtime", "training")
    rooms = {path.parent.relative_to(ROOT) for floor in floors for path in (ROOT / floor).rglob("__init__.py")}
    own = {"integrations", "plugins", "core", "runtime"}  # their parts stand there
    general = [re.sub(r"<\w+>", "[^/]+", one) for one in named]
    left = [r for r in rooms if str(r) not in own and not any(re.match(g + "(/|$)", str(r)) for g in general)]
    assert not left
