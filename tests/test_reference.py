"""Pages that repeat what code says are as the code is, and say something of every command, key and name."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import evenload
import pytest
import yaml
from evenload import cli

DOCS = Path(evenload.__file__).parent / "docs"


@pytest.fixture(scope="module")
def documents() -> dict[str, str]:
    spec = spec_from_file_location("reference_of_docs", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    texts: dict[str, str] = module.documents()
    return texts


@pytest.mark.every_plugin
def test_the_pages_are_as_the_code_is(documents: dict[str, str]) -> None:
    assert {name: (DOCS / name).read_text() for name in documents} == documents, "make docs"


def test_every_command_and_option_is_there(documents: dict[str, str]) -> None:
    import typer

    group: Any = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        section = documents["reference.md"].partition(f"## evenload {name}\n")[2].partition("\n## ")[0]
        assert section
        options = {option for one in command.params for option in one.opts if option.startswith("--")}
        assert [option for option in options - {"--help"} if f"`{option}" not in section] == []


def test_every_public_name_is_there(documents: dict[str, str]) -> None:
    names = set(evenload.__all__) - {"__version__"}
    assert [name for name in names if f"\n### {name}\n" not in documents["reference.md"]] == []


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((DOCS.parent / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format requires
    assert citation["version"] == evenload.__version__


@pytest.mark.parametrize(
    "path", sorted((DOCS.parent / ".github" / "ISSUE_TEMPLATE").glob("w*.yml")), ids=lambda p: p.stem
)
def test_a_form_asks_by_commands_that_exist(path: Path) -> None:
    import typer

    form, group = yaml.safe_load(path.read_text()), typer.main.get_command(cli.app)
    assert {"name", "description", "body"} <= set(form)
    assert len({field["id"] for field in form["body"]}) == len(form["body"])
    verbs = re.findall(r"evenload (\w+)", path.read_text())
    assert verbs
    assert [verb for verb in verbs if verb not in group.commands] == []  # type: ignore[attr-defined]


def test_every_page_of_the_documents_is_in_one_section_of_the_index() -> None:
    index = (DOCS / "index.md").read_text()
    trees = re.findall(r"^```\{toctree\}\n:hidden:\n:caption: (.*?)\n\n(.*?)\n```", index, re.MULTILINE | re.DOTALL)
    assert [caption for caption, _ in trees] == ["Tutorials", "How to", "Reference", "Explanation"]
    listed = [name for _, names in trees for name in names.splitlines()]
    assert sorted(listed) == sorted({path.stem for path in DOCS.glob("*.md")} - {"index"})
    assert [name for name in listed if f"({name}.md)" not in index] == []
