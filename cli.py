"""The ``evenload`` command: the frame of `commands.verbs`. Exit codes: 0 fine, 1 the work failed, 2 a wrong request."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any

import typer
import typer.core

from . import __version__
from .core.errors import EvenloadError, RankError, shown
from .core.registry import load_plugins
from .core.verbs import VERBS, Verb

_LONGEST_WORD = 8192
"""Characters; no path is longer, and no list of values to sweep."""

for _verb in (
    Verb("train", "evenload.commands.verbs.ranks:train", order=10),
    Verb("verify", "evenload.commands.verbs.ranks:verify", order=20),
    Verb("bench", "evenload.commands.verbs.ranks:bench", order=30),
    Verb("plan", "evenload.commands.verbs.forecast:plan", order=40),
    Verb("profile", "evenload.commands.verbs.ranks:profile", order=60),
    Verb("export", "evenload.commands.verbs.ranks:export", order=70),
    Verb("watch", "evenload.commands.verbs.reports:watch", order=110),
    Verb("run", "evenload.commands.verbs.scripts:run", order=120, runs_command=True),
    Verb("env", "evenload.commands.verbs.scripts:env", order=130),
    Verb("check", "evenload.commands.verbs.scripts:check", order=140, runs_command=True),
    Verb("doctor", "evenload.commands.verbs.reports:doctor", order=160),
    Verb("plugins", "evenload.commands.verbs.reports:plugins", order=170),
    Verb("recipes", "evenload.commands.verbs.reports:recipes", order=180),
    Verb("schema", "evenload.commands.verbs.reports:schema", order=190),
):
    VERBS.register(_verb)


class Commands(Mapping[str, Any]):
    """Typer's commands by the names of verbs, each made when somebody asks for it."""

    def __init__(self) -> None:
        self._own = VERBS.registered()
        VERBS.load_entry_points()

    def __getitem__(self, name: str) -> Any:
        return _command(self._own.get(name) or self._rows()[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows())

    def __len__(self) -> int:
        return len(self._rows())

    def _rows(self) -> Mapping[str, Verb]:
        """All rows, those of plugins among them, which take time to import."""
        load_plugins()
        return VERBS.registered()


@cache
def _command(verb: Verb) -> Any:
    """The command of a row; where its function cannot be imported, one that says so."""
    settings: dict[str, Any] = {"ignore_unknown_options": True} if verb.runs_command else {}
    try:
        work = VERBS.imported(verb)
    except EvenloadError as error:
        refusal = error
        settings = {"ignore_unknown_options": True, "allow_extra_args": True}

        def work() -> None:
            raise refusal

        work.__doc__ = f"Cannot be imported ({error.found})."
    one = typer.Typer(add_completion=False)
    one.command(verb.name, context_settings=settings)(work)
    return typer.main.get_command(one)


class _Group(typer.core.TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = Commands()


app = typer.Typer(
    name="evenload",
    cls=_Group,
    help="Evens the load of LLM training inside Megatron-Core and DeepSpeed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"evenload {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Evens the load of LLM training inside Megatron-Core and DeepSpeed."""


def main() -> None:
    """Entry point: every EvenloadError becomes a message on stderr and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may hold what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _refuse_long_words(sys.argv[1:])
        app()
    except EvenloadError as error:
        print(f"evenload: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RankError) else 2) from None


def _refuse_long_words(words: list[str]) -> None:
    """Raise EvenloadError for a word that the parser's messages would repeat in full; a COMMAND to run is its own."""
    for word in words[: words.index("--")] if "--" in words else words:
        if len(word) > _LONGEST_WORD:
            detail = f"{len(word)} characters: {shown(word)}"
            raise EvenloadError("a word of the command line is too long", detail, "write it into the recipe")
