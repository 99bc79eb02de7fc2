"""The kind of a row is seen by its fields; what can be read in two ways is refused."""

import pytest
from evenload.core.errors import EvenloadError
from evenload.data.rows.kinds import field_kind, row_form

CASES = {
    "plain text": ({"text": "a"}, "text", ("plain", "text")),
    "ids before text": ({"text": "a", "tokens": [1]}, "text", ("plain", "tokens")),
    "ids with classes": ({"input_ids": [1], "labels": 3}, "text", ("plain", "input_ids")),
    "labels": ({"input_ids": [1], "labels": [1], "text": "a"}, "text", ("labels", "input_ids")),
    "labels of a named field": ({"mine": [1], "labels": [1]}, "mine", ("labels", "mine")),
    "ids beside messages, as TRL leaves them": ({"input_ids": [1], "messages": [{}]}, "text", ("plain", "input_ids")),
    "prompts": ({"prompt": "a", "completion": "b", "id": 1}, "text", ("prompts", "prompt")),
    "messages": ({"messages": [{}], "prompt": "a"}, "text", ("chats", "messages")),
    "messages of another name": ({"turns": [{}], "text": "a"}, "turns", ("chats", "turns")),
    "a completion as text": ({"prompt": "a", "completion": "b"}, "completion", ("plain", "completion")),
}


@pytest.mark.parametrize(("row", "text_key", "form"), CASES.values(), ids=CASES)
def test_fields_tell_the_kind(row, text_key, form):
    assert row_form({name: field_kind(value) for name, value in row.items()}, text_key, "line 1") == form


REFUSED = {
    "text and messages": ({"text": "a", "messages": [{}]}, "text; messages"),
    "messages and pairs": ({"prompt": "", "completion": "", "messages": [{}]}, "prompt and completion; messages"),
    "a prompt alone": ({"prompt": "a"}, "without completion"),
    "nothing": ({"txt": "a"}, "did you mean 'txt'"),
}


@pytest.mark.parametrize(("row", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_clear_is_refused_by_name(row, words):
    with pytest.raises(EvenloadError, match=words):
        row_form({name: field_kind(value) for name, value in row.items()}, "text", "line 1")
