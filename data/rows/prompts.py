"""``{"prompt", "completion"}``: the completion alone carries loss; ``{"prompt", "completions"}``: as many such rows.

Prompt and completion are tokenised together, as a model meets them; targets begin where that differs from the prompt
alone, which follows it unless a token reaches over the border (TRL does the same). The tokenizer's end of sequence
follows a completion of text that does not end with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import EvenloadError, shown
from ..tokenizers import Tokenizer, end_of, with_end
from .chats import ChatTemplate, extras_of
from .kinds import COMPLETION, COMPLETIONS, OF_TEMPLATE, PROMPT, Encoded, Encoder, Placed, no_completion, shared_prefix


class PromptEncoder(Encoder):
    """An encoder that makes a document of each prompt with its completion."""

    fields = (PROMPT, COMPLETION, COMPLETIONS, *OF_TEMPLATE)
    branches = True

    def __init__(self, tokenizer: Tokenizer, *, append_eos: bool | None, all_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._all = all_tokens
        self._append_eos = append_eos
        self.identity = f"prompts-2 {tokenizer.identity} {append_eos} {all_tokens}"

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def encode(self, rows: Sequence[Placed]) -> list[list[Encoded]]:
        answers = [_answers(one) for one in rows]
        encoded = iter(self._encode([one for own in answers for one in own]))
        return [[next(encoded) for _ in own] for own in answers]

    def _encode(self, rows: Sequence[Placed]) -> list[Encoded]:
        chats = [_is_chat(one) for one in rows]
        texts = [one for one, chat in zip(rows, chats, strict=True) if not chat]
        of_texts = iter(self._of_texts(texts))
        return [self._of_chat(one) if chat else next(of_texts) for one, chat in zip(rows, chats, strict=True)]

    def _of_texts(self, rows: Sequence[Placed]) -> list[Encoded]:
        eos = end_of(self._tokenizer, self._append_eos)
        wholes = [row[PROMPT] + with_end(row[COMPLETION], eos) for _, row in rows]
        prompts = self._tokenizer.encode_all([row[PROMPT] for _, row in rows])
        return [self._encoded(*pair) for pair in zip(prompts, self._tokenizer.encode_all(wholes), strict=True)]

    def _of_chat(self, one: Placed) -> Encoded:
        prompt, completion = one.row[PROMPT], one.row[COMPLETION]
        alone = self._template.tokens(prompt, extras_of(one), one.place, ask=True)
        return self._encoded(alone, self._template.tokens([*prompt, *completion], extras_of(one), one.place))

    def _encoded(self, prompt: Sequence[int], whole: Sequence[int]) -> Encoded:
        return Encoded.behind(whole, 0 if self._all else shared_prefix(prompt, whole))


def _answers(one: Placed) -> list[Placed]:
    """A row for each of its completions. Raises EvenloadError where there are none, or one along with several."""
    several = one.row.get(COMPLETIONS)
    if several is None:
        return [one]
    if one.row.get(COMPLETION) is not None or not isinstance(several, list) or not several:
        what, do = (
            f"{COMPLETIONS} of {one.place} are no list of completions",
            f"give a list of them, and no {COMPLETION}",
        )
        raise EvenloadError(what, shown(several), do)
    return [Placed(one.place, {**one.row, COMPLETION: each}) for each in several]


def _is_chat(one: Placed) -> bool:
    """Whether prompt and completion are lists of messages. Raises EvenloadError where they are not both alike."""
    if one.row.get(PROMPT) is None or one.row.get(COMPLETION) is None:
        raise no_completion(one.place, {name: None for name, value in one.row.items() if value is not None})
    pair = one.row[PROMPT], one.row[COMPLETION]
    for kind in (str, list):
        if all(isinstance(part, kind) for part in pair):
            return kind is list
    detail = "; ".join(shown(part) for part in pair)
    do = "give both as text, or both as lists of messages"
    raise EvenloadError(f"prompt and completion of {one.place} are not alike", detail, do)
