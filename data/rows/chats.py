"""``{"messages": [{"role", "content"}, ...]}``: what the assistant says carries loss.

The tokenizer's own template renders a chat. Where it marks the assistant's part with ``{% generation %}``, that is what
counts; elsewhere answers are found by differences of renderings (`turns`). Templates known to leave out thoughts are
taken in their training form, with which each answer keeps its own: the templates of Qwen3, 3.5 and 3.6 leave the
thoughts of earlier answers out, and those of DeepSeek every thought that stands in the content, so none would be
learned. It is as in TRL's training forms of Qwen's templates and of DeepSeek-R1's distillates; a test compares tokens
and labels. Of other templates a warning says what of an answer is left out.

A template is a program of whoever made the tokenizer, so it runs in a sandbox; a row brings none of its own.

A row may hold several chats, each of which begins with a system message: Megatron's SFT form. Each is a document.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from ...core.errors import EvenloadError, nearest, shorten, shown
from ...core.input import reading
from ...core.input.sandbox import Budget, SandboxError, bounded
from ..samples.cut import IGNORE
from ..tokenizers import FolderTokenizer, Tokenizer
from .kinds import OF_TEMPLATE, SETTINGS, TOOLS, Encoded, Encoder, Placed
from .turns import ANSWERS, Messages, UnlikeError, end_mark, left_out, marking, spans_of_answers

log = logging.getLogger(__name__)

Extras = Mapping[str, Any]
"""What a row hands its template besides the messages."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DO = "mend the row, or the tokenizer's chat_template.jinja"
_DO_AS_TEMPLATE = (
    f'{_DO}; templates differ in what they take: content as text or as [{{"type": "text", "text": ...}}], '
    "arguments of tool calls as an object or as JSON text, system messages, tools"
)
_LEFT_OUT = (
    "the chat template drops part of an answer of %s, so it carries no loss: %s; if the template has a flag that keeps "
    "it, set that in chat_template_kwargs (said once)"
)
_PER_CALL_S, _PER_BYTE_S = 1e-3, 1e-7
"""CPU seconds that a template may take on average: five times what those of public models do."""
_OF_ROWS = {"documents", "kwargs"}
"""Of what `transformers` takes besides the messages, what a row may say."""

_ARGUMENTS = "tool['function']['arguments']"
_TRAINED = (
    ("loop.index0 > ns.last_query_index", "true"),
    ("loop.last or (not loop.last and reasoning_content)", "true"),
    ("{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}", ""),
    ("{%- if message['content'] is none %}", "{%- if not message['content'] %}"),
    (f"+ {_ARGUMENTS} +", f"+ ({_ARGUMENTS} if {_ARGUMENTS} is string else {_ARGUMENTS} | tojson) +"),
)
"""What a template says, and what it says in training."""


class ChatTemplate:
    """The chat template of a tokenizer's folder; messages are checked before it meets them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._budget = Budget(per_call_s=_PER_CALL_S, per_byte_s=_PER_BYTE_S)
        self._end_marks: dict[str, str] = {}
        self._warned = False

    @property
    def _folder(self) -> FolderTokenizer:
        if isinstance(self._tokenizer, FolderTokenizer):
            return self._tokenizer
        do = "set data.tokenizer to a folder with tokenizer_config.json and a chat template"
        raise EvenloadError("chats need a chat template", "a tokenizer without one", do)

    @cached_property
    def _own(self) -> set[str]:
        """What no row may say, since the tokenizer does."""
        hub = self._folder.hub
        return {*inspect.signature(hub.apply_chat_template).parameters, *hub.special_tokens_map} - _OF_ROWS

    def tokens(self, messages: Any, extras: Extras, place: str, *, ask: bool = False) -> list[int]:
        """Token ids of a chat; ``ask``: with what makes the assistant answer after it."""
        messages, template = check_messages(messages, place), self._template(extras, place)
        return list(self._folder.marked(self._render(messages, extras, place, template, ask=ask)[0]).ids)

    def encoded(self, messages: Messages, extras: Extras, place: str) -> Encoded:
        """A chat and its targets."""
        template = training_form(self._template(extras, place))
        marks = _MARKS.search(template) is not None
        text, spans = self._render(messages, extras, place, template, marks=marks)
        if not marks:
            text, spans = self._answers(messages, text, extras, place, template)
        said = "".join(text[start:stop] for start, stop in spans)
        for message in messages:
            if message["role"] == ANSWERS and not self._warned and (part := left_out(message, said)) is not None:
                self._warned = True
                log.warning(_LEFT_OUT, place, shown(part))
        marked = self._folder.marked(text)
        tokens, counts = np.array(marked.ids, dtype=np.int64), np.zeros(len(marked.ids), dtype=np.bool_)
        starts, stops = np.array(marked.offsets, dtype=np.int64).reshape(-1, 2).T
        for start, stop in spans:
            if marks:  # as transformers counts them
                first, last = marked.char_to_token(start), marked.char_to_token(stop - 1)
                counts[len(counts) if first is None else first : last + 1 if last else None] = True
            else:
                counts |= (stops > start) & (starts < stop)
        return Encoded(tokens, np.where(counts, tokens, IGNORE))

    def _answers(
        self, messages: Messages, text: str, extras: Extras, place: str, template: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat with the end mark of its last answer, and where targets begin and end in it."""

        def render(messages: Messages, *, ask: bool = False, marked: bool = False) -> str:
            return self._render(messages, extras, place, marking(template) if marked else template, ask=ask)[0]

        def ends(text: str) -> Sequence[int]:
            return [stop for _, stop in self._folder.marked(text).offsets]

        try:
            spans = spans_of_answers(messages, text, render, ends)
        except UnlikeError as error:
            what = f"the chat template renders the beginning of {place} otherwise than the whole"
            detail = f"up to message {error}, {shown(messages[error.args[0]].get('content'))}"
            do = "mark by {% generation %} what the assistant says, or train prompts too: data.loss_on=all"
            raise EvenloadError(what, detail, do) from error
        if template not in self._end_marks:
            self._end_marks[template] = ""
            with suppress(EvenloadError):  # it takes no chat of two lines
                self._end_marks[template] = end_mark(render, ends)
        if mark := self._end_marks[template]:
            text += mark if messages[-1]["role"] == ANSWERS and not messages[-1].get("tool_calls") else ""
            spans = [(start, stop + 1) for start, stop in spans]
        return text, spans

    def _template(self, extras: Extras, place: str) -> str:
        hub = self._folder.hub
        try:
            return str(hub.get_chat_template(tools=extras.get(TOOLS)))
        except ValueError as error:
            do = "add chat_template.jinja to the tokenizer's folder, or give prompts and completions as text"
            raise EvenloadError(f"there is no chat template for {place}", shorten(str(error)), do) from error

    def _render(
        self,
        messages: Messages,
        extras: Extras,
        place: str,
        template: str,
        *,
        ask: bool = False,
        marks: bool = False,
    ) -> tuple[str, Sequence[tuple[int, int]]]:
        """The text of a chat; with ``marks``, also where what the assistant says begins and ends in it."""
        hub = self._folder.hub
        settings = dict(extras.get(SETTINGS, {}))
        if replaced := sorted(settings.keys() & self._own):
            detail, do = ", ".join(replaced), "take it out: the template is that of the tokenizer's folder"
            raise EvenloadError(f"{SETTINGS} of {place} replaces what its tokenizer says", detail, do)
        from transformers.utils.chat_template_utils import render_jinja_template

        named = {**settings, "tools": extras.get(TOOLS), "chat_template": template, "add_generation_prompt": ask}
        chat = [{name: part for name, part in message.items() if part is not None} for message in messages]
        named |= {**hub.special_tokens_map, "conversations": [chat], "return_assistant_tokens_mask": marks}
        try:
            texts, spans = bounded(self._budget, render_jinja_template, **named)
        except SandboxError as error:
            what, detail = f"the chat template fails on {place}", f"{error}; of {shorten(str(self._folder.folder))}"
            raise EvenloadError(what, detail, _DO_AS_TEMPLATE) from error
        return texts[0], spans[0] if marks else ()


class ChatEncoder(Encoder):
    """An encoder that makes a document of each chat."""

    def __init__(self, tokenizer: Tokenizer, field: str, *, all_tokens: bool) -> None:
        self._template = ChatTemplate(tokenizer)
        self._field = field
        self._all = all_tokens
        self._tokenizer = tokenizer
        self.fields = (field, *OF_TEMPLATE)
        self.identity = f"chats-3 {field} {tokenizer.identity} {all_tokens}"

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def encode(self, rows: Sequence[Placed]) -> list[list[Encoded]]:
        return [[self._encoded(chat, one) for chat in self._chats(one)] for one in rows]

    def _encoded(self, chat: Messages, one: Placed) -> Encoded:
        if self._all:
            return Encoded.behind(self._template.tokens(chat, extras_of(one), one.place), 0)
        return self._template.encoded(chat, extras_of(one), one.place)

    def _chats(self, one: Placed) -> list[Messages]:
        messages = check_messages(one.row.get(self._field), one.place)
        first = [number for number, message in enumerate(messages) if not number or message["role"] == "system"]
        return [messages[start:stop] for start, stop in zip(first, [*first[1:], len(messages)], strict=True)]


def training_form(template: str) -> str:
    """A chat template that leaves no thoughts out, if it is one of those known here; else the template as it is."""
    for served, trained in _TRAINED:
        template = template.replace(served, trained)
    return template


def check_messages(value: Any, place: str) -> Messages:
    """``value`` if it is a chat, without the fields that are null; raises EvenloadError with what is none."""
    if not isinstance(value, list) or not value:
        do = 'give a list of {"role": ..., "content": ...}'
        raise EvenloadError(f"{place} has no messages", shown(value), do)
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise EvenloadError(f"{place} has a message without role", shown(message), 'give "role" and "content"')
        if message["role"] not in ROLES:
            raise EvenloadError(
                f"{place} has a message of unknown role", message["role"], nearest(message["role"], ROLES)
            )
        if message.get("content") is None and not message.get("tool_calls"):
            raise EvenloadError(f"{place} has a message without content", shown(message), 'give "content"')
        messages.append({name: part for name, part in message.items() if part is not None or name == "content"})
    return messages


def extras_of(one: Placed) -> Extras:
    """What a row hands its template besides the messages; tools may be JSON. Raises EvenloadError."""
    extras = {name: one.row[name] for name in OF_TEMPLATE if one.row.get(name) is not None}
    if isinstance(extras.get(TOOLS), str):
        extras[TOOLS] = reading.parse_json(extras[TOOLS], f"the field {TOOLS} of {one.place}", _DO)
    if SETTINGS in extras:
        extras[SETTINGS] = reading.mapping(extras[SETTINGS], f"the field {SETTINGS} of {one.place}", _DO)
    return extras
