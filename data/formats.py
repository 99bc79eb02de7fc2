"""Which documents a spec means (built-in sets, JSON Lines, Megatron's pair, arrow, parquet), or why it means none."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..core.errors import SHOWN, EvenloadError, shorten, shown
from ..core.input import reading
from ..core.input.hub import or_download
from . import stdlib
from .arrow import ArrowDocuments, parquet_as_arrow
from .bin_idx import BinIdxDocuments
from .documents import Documents
from .jsonl import JsonlDocuments
from .rows.chats import ChatEncoder
from .rows.documents import RowDocuments
from .rows.groups import group_numbers, no_group
from .rows.kinds import Encoder, LabelEncoder, RowForm, row_form
from .rows.prompts import PromptEncoder
from .rows.readers import ArrowRows, JsonlRows, Rows, column_kinds, first_kinds
from .rows.weights import no_weight, read_weights
from .samples.cut import TargetSpans
from .tokenizers import EndingTokenizer, Tokenizer


class Settings(NamedTuple):
    """How text and targets of rows are read."""

    tokenizer: Tokenizer
    text_key: str
    append_eos: bool | None
    """Whether texts end with the end of sequence; None: completions do, plain text does not."""
    all_tokens: bool
    """Whether prompts carry loss too."""
    group: str | None = None
    """The field whose value says which rows stay together; None: none do."""
    weights: str | None = None
    """The field with the weights of targets; None: each is 1."""

    @property
    def columns(self) -> dict[str, Callable[[str, str, Collection[str]], EvenloadError]]:
        """The fields besides those of the samples, and the error for a table that lacks one."""
        wanted = {self.group: no_group, self.weights: no_weight}
        return {field: error for field, error in wanted.items() if field is not None}

    @property
    def of_text(self) -> Tokenizer:
        """The tokenizer of plain text."""
        return EndingTokenizer(self.tokenizer) if self.append_eos else self.tokenizer


def open_documents(spec: str, settings: Settings) -> Documents:
    """The documents of a spec. Raises EvenloadError where there are none, or where they are to be in groups or to have
    weights and are of no rows."""
    documents, rows = _documents(spec, settings)
    of_rows = ("group", settings.group, "say their group"), ("weight_column", settings.weights, "give their weight")
    for key, field, what in of_rows:
        if field is not None and rows is None:
            detail, do = f"data.{key} {shown(field)}", f"give .jsonl, arrow or parquet, or leave data.{key} out"
            raise EvenloadError(f"the samples of {spec} are no rows that {what}", detail, do)
    if rows is not None and settings.group is not None:
        keys, numbers = group_numbers(rows, settings.group)
        documents.groups = numbers if documents.keys is None else numbers[np.searchsorted(keys, documents.keys)]
        documents.trunks = None  # samples of a group are on one rank, those of a trunk where it pays
    if rows is not None and settings.weights is not None:
        everything = TargetSpans(np.zeros(1, dtype=np.int64), np.array([documents.lengths.sum()]))
        spans = documents.spans or everything
        documents.weights = read_weights(rows, settings.weights, documents, spans)
        if documents.weights is not None:
            documents.weighed_spans, documents.spans = spans, documents.weights.nonzero(spans)
    return documents


def _documents(spec: str, settings: Settings) -> tuple[Documents, Rows | None]:
    """The documents, and the rows that they were made of, if they were of any that hold `Settings.columns`."""
    if stdlib.is_sources(spec) and settings.of_text.identity == "bytes":
        return stdlib.StdlibDocuments(spec), None
    if stdlib.is_sources(spec):
        return _jsonl(stdlib.sources_as_jsonl(spec), settings, spec)
    if stdlib.is_pairs(spec):
        return _jsonl(stdlib.pairs_as_jsonl(spec), settings, spec)
    path = Path(os.path.expanduser(spec))
    if reading.is_file(path) and path.suffix == ".jsonl":
        return _jsonl(path, settings)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if reading.is_file(f"{prefix}.idx") or path.suffix in (".bin", ".idx"):
        return BinIdxDocuments(prefix), None
    files = table_files(path)
    if not files:
        raise nothing_there(spec, path)
    return _tables(spec, files, settings)


def _jsonl(path: Path, settings: Settings, name: str | None = None) -> tuple[Documents, Rows]:
    form, rows = row_form(first_kinds(path), settings.text_key, name or shorten(str(path))), JsonlRows(path, name)
    if form.kind == "plain":
        return JsonlDocuments(path, settings.of_text, form.field, name), rows
    return RowDocuments(rows, _encoder(form, settings)), rows


def _tables(spec: str, files: list[Path], settings: Settings) -> tuple[Documents, Rows | None]:
    columns, further = column_kinds(files[0]), settings.columns
    form = row_form(columns, settings.text_key, str(files[0]))
    for field, error in further.items():
        if field not in columns:
            raise error(str(files[0]), field, columns)
    encoder = None if form.kind == "plain" else _encoder(form, settings)
    names = encoder.fields if encoder else (form.field,)
    if files[0].suffix == ".parquet":
        files = [parquet_as_arrow(files, (*names, *further))]
    rows = ArrowRows(spec, files, further) if further else None
    if encoder is None:
        return ArrowDocuments(spec, files, settings.of_text, form.field), rows
    return RowDocuments(ArrowRows(spec, files, names), encoder), rows


def _encoder(form: RowForm, settings: Settings) -> Encoder:
    if form.kind == "labels":
        return LabelEncoder(form.field)
    if form.kind == "chats":
        return ChatEncoder(settings.tokenizer, form.field, all_tokens=settings.all_tokens)
    return PromptEncoder(settings.tokenizer, append_eos=settings.append_eos, all_tokens=settings.all_tokens)


_TABLES = (".arrow", ".parquet")
_PAIR = (".bin", ".idx")
_BUILT_IN = (stdlib.NAME, stdlib.PAIRS, stdlib.HELD_OUT)


def table_files(path: Path) -> list[Path]:
    """The arrow or parquet files of a folder, a pattern or a single path; empty where there are none."""
    if os.path.isdir(path):
        if reading.is_file(path / "state.json"):
            return _saved_files(path)
        files = [p for p in _inside(path) if p.suffix in _TABLES]
    elif reading.is_file(path):
        files = [path] if path.suffix in _TABLES else []
    else:
        names = [] if "\0" in str(path) else glob.glob(str(path))
        files = sorted(Path(name) for name in names if name.endswith(_TABLES))
    for file in files:
        reading.open_file(file, shorten(str(file)), "save the data set again").close()
    suffixes, splits = {p.suffix for p in files}, {p.stem.split("-")[0] for p in files if "-of-" in p.stem}
    if len(suffixes) > 1 or len(splits) > 1:
        detail = f"files {', '.join(sorted(suffixes))} of {', '.join(sorted(splits)) or 'no named split'}"
        do = f"name the files with a pattern, as '{path}/train-*.parquet'"
        raise EvenloadError(f"{path} holds more than one data set", detail, do)
    return files


def _saved_files(folder: Path) -> list[Path]:
    """The files that `Dataset.save_to_disk` listed in state.json, in its order."""
    name, do = f"{shorten(str(folder))}/state.json", "save the data set again"
    state = reading.mapping(reading.read_json(folder / "state.json", name, do), name, do)
    try:
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise EvenloadError(f"{name} is damaged", shown(error), do) from error
    missing = [path.name for path in files if not reading.is_file(path)]
    fault = f"missing files: {shorten(', '.join(missing))}" if missing else ""
    if not files:
        fault = "no data files"
    if state.get("_indices_data_files"):
        fault = "rows chosen by an index next to the data, as releases before 2.0 saved it"
    if fault:
        raise EvenloadError(f"{folder} is not a whole saved data set", fault, "save it again with Dataset.save_to_disk")
    return files


def nothing_there(spec: str, path: Path) -> EvenloadError:
    """The error for a spec that means no data."""
    if os.path.isdir(path):
        tables = (p for p in _inside(path) if p.is_dir() and any(f.suffix in _TABLES for f in _inside(p)))
        inside = sorted((p.name for p in tables), key=lambda name: name != "train")
        return EvenloadError(
            f"the folder {spec} holds no .arrow or .parquet file",
            f"data sets below it: {', '.join(inside)}" if inside else "no data set below it either",
            f"open one of them, as {path / inside[0]}" if inside else "give the folder that save_to_disk wrote",
        )
    if reading.is_file(path):
        known = ".jsonl, .bin/.idx, .arrow, .parquet"
        return EvenloadError(f"{spec} is of no known kind", f"the ending {shown(path.suffix)}", f"known: {known}")
    siblings = [p.name for p in _inside(path.parent)] if os.path.isdir(path.parent) else []
    close = difflib.get_close_matches(path.name[:SHOWN], [*siblings, *_BUILT_IN], n=3, cutoff=0.5)
    nothing = f"nothing of a similar name in {shorten(str(path.parent))}"
    detail = f"of a similar name: {', '.join(close)}" if close else nothing
    do = or_download(f"give a path to data, or {' or '.join(_BUILT_IN)}", "data.source", spec, "dataset")
    return EvenloadError(f"there is no data {shown(spec)}", detail, do)


def refuse_outside(root: Path, specs: Mapping[str, str]) -> None:
    """Raise EvenloadError where a spec, by the key that says it, leads out of a folder: by itself, by a link, or by a
    file that it opens. What is built in leads nowhere."""
    within = os.path.realpath(root)
    for key, spec in specs.items():
        for path in () if spec == "bytes" or spec.partition("/")[0] in _BUILT_IN else _opened(Path(spec).expanduser()):
            if os.path.commonpath([within, real := os.path.realpath(path)]) != within:
                detail, do = f"{shorten(str(path))}, which is {shorten(real)}", f"put it below {shorten(within)}"
                raise EvenloadError(f"{key} leads out of plugins.lora.root", detail, do)


def _opened(path: Path) -> Iterator[Path]:
    """What opening a spec may read, itself first."""
    yield path
    yield from (Path(f"{path.with_suffix('') if path.suffix in _PAIR else path}{suffix}") for suffix in _PAIR)
    yield from path.glob("*")
    yield from path.glob("*/*")
    yield from table_files(path)


def _inside(folder: Path) -> list[Path]:
    """What a folder holds, by name; nothing where it may not be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
