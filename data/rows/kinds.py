"""What kind of row a data set has, seen by its fields, and what turns rows into documents: an `Encoder` of each kind.

| fields | kind | targets |
|---|---|---|
| ``input_ids`` or ``tokens``, lists of labels in ``labels`` | labels | where the label is not -100 |
| ``prompt`` and ``completion``, both text or both chats | prompts | the completion |
| ``prompt`` and ``completions``, a list of them | prompts, one document for each | the completion |
| ``messages`` | chats | what the assistant says |
| ``input_ids``, ``tokens`` or ``text`` | plain | all |

``data.text_key`` names another field for the first (token ids), the third (messages) and the last kind. ``labels`` say
what each token counts as, at its own place, as Hugging Face models take it: -100 carries no loss; else a label is the
token itself, or another id that is to be learned there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...core.errors import EvenloadError
from ..documents import ID_FIELDS, choose_field, missing_field
from ..jsonl import check_ids
from ..samples.cut import IGNORE

RowKind = Literal["plain", "labels", "prompts", "chats"]
FieldKind = Literal["messages", "ids", "other"]

PROMPT, COMPLETION, MESSAGES, LABELS = "prompt", "completion", "messages", "labels"
COMPLETIONS = "completions"
TOOLS, SETTINGS = "tools", "chat_template_kwargs"
OF_TEMPLATE = (TOOLS, SETTINGS)
"""Fields that a chat template is handed besides the messages, as TRL does."""


def field_kind(value: Any) -> FieldKind:
    """What a value of JSON is."""
    if not isinstance(value, list):
        return "other"
    return "messages" if value and isinstance(value[0], dict) else "ids"


class RowForm(NamedTuple):
    """The kind of rows, and the field that holds the text, the token ids or the messages."""

    kind: RowKind
    field: str


def row_form(fields: Mapping[str, FieldKind], text_key: str, where: str) -> RowForm:
    """The form of rows with these fields. Raises EvenloadError where they can be read in more than one way or none."""
    default = text_key == "text"
    if not default and fields.get(text_key) == "messages":
        return RowForm("chats", text_key)
    if not default or any(name in fields for name in ID_FIELDS):
        field = choose_field(fields, text_key, where)
        labelled = fields[field] == "ids" and fields.get(LABELS) == "ids"
        return RowForm("labels" if labelled else "plain", field)
    forms = {
        "text": RowForm("plain", text_key),
        f"{PROMPT} and {COMPLETION}": RowForm("prompts", PROMPT),
        f"{PROMPT} and {COMPLETIONS}": RowForm("prompts", PROMPT),
        MESSAGES: RowForm("chats", MESSAGES),
    }
    there = [name for name in forms if all(field in fields for field in name.split(" and "))]
    if len(there) > 1:
        do = f"set data.text_key={MESSAGES} for chats, or leave out the fields that are not meant"
        raise EvenloadError(f"{where} can be read in {len(there)} ways", f"fields {'; '.join(there)}", do)
    if there:
        return forms[there[0]]
    raise no_completion(where, fields) if PROMPT in fields else missing_field([*ID_FIELDS, "text"], fields, where)


def no_completion(place: str, fields: Mapping[str, Any]) -> EvenloadError:
    """The error for a prompt that nothing follows."""
    detail = f"fields {', '.join(fields)}"
    do = "give prompt and completion in every row, or name one field with data.text_key"
    return EvenloadError(f"{place} has a prompt without completion", detail, do)


Row = Mapping[str, Any]


class Placed(NamedTuple):
    """A row, and its place for messages: ``line 12 of corpus.jsonl``."""

    place: str
    row: Row


class Encoded(NamedTuple):
    """A document's token ids and labels."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    """[length] at each token's own place, `IGNORE` where it carries no loss."""

    @classmethod
    def behind(cls, tokens: Sequence[int], prompt: int) -> Encoded:
        """A document whose first ``prompt`` tokens carry no loss."""
        ids = np.array(tokens, dtype=np.int64)
        labels = ids.copy()
        labels[:prompt] = IGNORE
        return cls(ids, labels)


class Encoder(Protocol):
    """Makes the documents of rows of one kind."""

    identity: str
    """Equal for encoders that make the same of a row: part of the name of what is kept in the cache."""
    fields: tuple[str, ...]
    """What it reads of a row, where it is there."""
    tokenises: bool = True
    """Whether its documents are made of text; else a row is one document."""
    branches: bool = False
    """Whether the documents of a row stay together, and begin alike."""

    @property
    def vocab_size(self) -> int:
        """Every token id is below it; 0 where only the rows tell."""

    def encode(self, rows: Sequence[Placed]) -> list[list[Encoded]]:
        """The documents of each row. Raises EvenloadError with the row's place."""


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists begin with alike."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.array(one[:length]) != np.array(other[:length]))
    return int(differ[0]) if len(differ) else length


_DO = "store a label for every token: its id, or -100 where it carries no loss"


class LabelEncoder(Encoder):
    """One document a row; a row without token ids is empty."""

    vocab_size = 0
    tokenises = False

    def __init__(self, field: str) -> None:
        self._field, self.fields = field, (field, LABELS)
        self.identity = f"labels-1 {field}"

    def encode(self, rows: Sequence[Placed]) -> list[list[Encoded]]:
        return [[self._encoded(one)] for one in rows]

    def _encoded(self, one: Placed) -> Encoded:
        tokens, labels = (one.row.get(name) for name in self.fields)
        ids = _integers([] if tokens is None else tokens, self._field, one.place)
        values = _integers([] if labels is None else labels, LABELS, one.place, besides=IGNORE)
        if len(ids) != len(values):
            what = f"the labels of {one.place} are not as many as its tokens"
            raise EvenloadError(what, f"{len(values)} labels, {len(ids)} tokens", _DO)
        return Encoded(ids, values)


def _integers(value: Any, field: str, place: str, besides: int | None = None) -> NDArray[np.int64]:
    """Token ids of a row, or ``besides``. Raises EvenloadError with the first that is neither."""
    ids = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(ids, list) and besides is not None:
        ids = [0 if each == besides else each for each in ids]
    check_ids(ids, field, place)
    return np.array(value, dtype=np.int64)
