"""What kind of row a data set has, seen by its fields.

| fields | kind | targets |
|---|---|---|
| ``input_ids`` or ``tokens``, lists of labels in ``labels`` | labels | where the label is not -100 |
| ``prompt`` and ``completion``, both text or both chats | prompts | the completion |
| ``messages`` | chats | what the assistant says |
| ``input_ids``, ``tokens`` or ``text`` | plain | all |

``data.text_key`` names another field for the first (token ids), the third (messages) and the last kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ...core.errors import EvenloadError
from ..documents import ID_FIELDS, choose_field, missing_field

RowKind = Literal["plain", "labels", "prompts", "chats"]
FieldKind = Literal["messages", "ids", "other"]

PROMPT, COMPLETION, MESSAGES, LABELS = "prompt", "completion", "messages", "labels"
TOOLS, SETTINGS = "tools", "chat_template_kwargs"
OF_TEMPLATE = (TOOLS, SETTINGS)
"""Fields that a chat template is handed beside the messages, as TRL does."""


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
