"""Where the answers of a chat stand in its text, by a chat template that does not mark them: differences of renderings.

A template renders messages in a loop. A copy of it puts a mark at the beginning of each round of each of its loops: a
field of the message that the loop is at, empty for what is no message. So all turns at once tell where each begins, and
the copy counts only if its text without the marks is the template's own. Of loops that meet all answers in their order
that one counts whose turns hold most of their messages; others look the messages over. Where no loop does, beginnings
of the chat are rendered instead, and must be those of the whole. docs/data.md has the rules of what carries loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

Messages = Sequence[Mapping[str, Any]]
ANSWERS = "assistant"

_FIELD, _END = "\ue000", "\ue001"
_LOOP = re.compile(r"\{%[-+]?\s*for\s+(\w+)\s+in\b(?!\s*range)(?:[^%]|%(?!\}))*?([-+]?)%\}")
_MARK = re.compile(rf"{_FIELD}(\d+) (\d+){_END}")
_THOUGHTS, _TAGS = ("reasoning_content", "reasoning", "thinking"), re.compile("</?think>")
_QUESTION, _ANSWER = {"role": "user", "content": "q"}, {"role": ANSWERS, "content": _END}

Render = Callable[..., str]
"""Makes the text of messages; ``ask``: with what makes the assistant answer; ``marked``: by the marking copy."""
TokenEnds = Callable[[str], Sequence[int]]
"""Where each token of a text ends in it."""


class UnlikeError(Exception):
    """The chat up to the message of this number is rendered otherwise than as the beginning of the whole."""


@cache
def marking(template: str) -> str:
    """The copy of a template; as blocks do and expressions do not, its marks take the end of their line away."""
    loops = count()

    def marked(loop: re.Match[str]) -> str:
        mark = f"{{{{ {loop[1]}['{_FIELD}'] | replace('?', '{next(loops)}') }}}}"
        return f"{loop[0]}{mark}{{% if 0 %}}{{% endif {loop[2]}%}}"

    return _LOOP.sub(marked, template)


def spans_of_answers(messages: Messages, text: str, render: Render, ends: TokenEnds) -> list[tuple[int, int]]:
    """Where targets begin and end in the text of a chat. Raises `UnlikeError`."""
    numbers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
    marked, loops = _read(messages, render) if numbers else (text, {})
    chats = [
        _Chat(messages, text, render, ends, loop, begins)
        for loop, begins in reversed(loops.items())
        if marked == text and [*begins] == sorted(begins) and begins.keys() >= {*numbers}
    ]
    if chats := [chat for chat in chats if chat.renders()]:
        chat = max(chats, key=_Chat.num_whole)
        return [span for number in numbers for span in chat.answer(number)]
    return [_by_beginnings(messages, number, text, render) for number in numbers]


def end_mark(render: Render, ends: TokenEnds) -> str:
    """The first token of a user's turn, by a template that puts nothing after an answer; else empty."""
    alone = render([_QUESTION, _ANSWER])
    follows = render([_QUESTION, _ANSWER, _QUESTION]).removeprefix(alone)
    return follows[: min(ends(follows), default=0)] if alone.endswith(_END) else ""


def left_out(message: Mapping[str, Any], text: str) -> str | None:
    """The first of what a message holds that a text lacks; None where it lacks nothing."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = [*map(message.get, _THOUGHTS), *(_TAGS.split(content) if isinstance(content, str) else ())]
    calls = calls if isinstance(calls, list) else []
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
    parts += [function.get("name") for function in functions if isinstance(function, Mapping)]
    return next((part for part in parts if isinstance(part, str) and part.strip() not in text), None)


def _read(messages: Messages, render: Render, *, ask: bool = False) -> tuple[str, dict[str, dict[int, int]]]:
    """The text of a chat, and where messages begin in it, by the loops that meet each once."""
    tagged = [{**message, _FIELD: f"{_FIELD}? {number}{_END}"} for number, message in enumerate(messages)]
    pieces = _MARK.split(render(tagged, ask=ask, marked=True))  # text, loop, message, text, loop, ...
    loops: dict[str, list[tuple[int, int]]] = {}
    length = len(pieces[0])
    for loop, message, piece in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        loops.setdefault(loop, []).append((int(message), length))
        length += len(piece)
    return "".join(pieces[::3]), {loop: dict(met) for loop, met in loops.items() if len(dict(met)) == len(met)}


class _Chat(NamedTuple):
    messages: Messages
    text: str
    render: Render
    ends: TokenEnds
    loop: str
    begins: Mapping[int, int]

    def answer(self, number: int) -> list[tuple[int, int]]:
        """Where the answer of this number is; in two parts where another message stands inside it."""
        begin, turn = self.begins[number], self.turn(number)
        start, stop = begin + self._shared(self._asked(number), turn), begin + len(turn)
        if number + 1 == len(self.messages) or (number + 1 in self.begins and self.turn(number + 1)):
            return [(start, stop)]
        alone = self._part(number + 1, number)
        first = self._shared(alone, turn)
        rest = len(alone) - first if turn[first:].endswith(alone[first:]) else 0
        return [(start, begin + first), (stop - rest, stop)]

    def renders(self) -> bool:
        """Whether the loop renders any message before its last; an idle one has all text after its last mark."""
        return any(self.turn(number).strip() for number in [*self.begins][:-1])

    def num_whole(self) -> int:
        """How many messages stand whole in their turns."""
        return sum(left_out(self.messages[number], self.turn(number)) is None for number in self.begins)

    def turn(self, number: int) -> str:
        """The text from where this message begins, or the last before it that the loop meets, to the next."""
        stop = next((begin for each, begin in self.begins.items() if each > number), None)
        return self.text[_begin(self.begins, number) : stop]

    def _asked(self, number: int) -> str:
        """What the template adds to the turns before where it asks for this answer."""
        asked, before = self._part(number, number - 1, ask=True), self.turn(number - 1)
        if not asked.startswith(before):
            before = self._part(number, number - 1)
        if not asked.startswith(before):
            raise UnlikeError(number)
        return asked[len(before) :]

    def _part(self, num_messages: int, number: int, *, ask: bool = False) -> str:
        """The text of so many messages, from where `turn` of this one begins."""
        text, loops = _read(self.messages[:num_messages], self.render, ask=ask)
        return text[_begin(loops.get(self.loop, {}), number) :]

    def _shared(self, one: str, other: str) -> int:
        """How many characters of whole tokens of one text another begins with."""
        pairs = enumerate(zip(one, other, strict=False))
        alike = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
        return alike if alike == len(one) else max((end for end in self.ends(one) if end <= alike), default=0)


def _begin(begins: Mapping[int, int], number: int) -> int:
    return max((begin for each, begin in begins.items() if each <= number), default=0)


def _by_beginnings(messages: Messages, number: int, text: str, render: Render) -> tuple[int, int]:
    before, until = render(messages[:number], ask=True), render(messages[: number + 1])
    if not (text.startswith(before) and text.startswith(until)):
        raise UnlikeError(number)
    return len(before), len(until)
