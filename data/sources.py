"""Where samples come from: one `Source` over every format, known by a spec.

| spec | data |
|---|---|
| ``python-stdlib`` | the sources of the running Python's library; of one package ``python-stdlib/PACKAGE`` |
| ``python-docstrings`` | instruction pairs of that library: signatures, and what they do |
| ``python-docstrings-held-out`` | those of every tenth module, which the former leaves out |
| ``python-docstrings/PACKAGE`` | pairs of one package; of them every tenth is held out, likewise |
| ``corpus.jsonl`` | JSON Lines: text, token ids, prompts, chats (`rows.kinds`) |
| ``prefix``, ``prefix.idx``, ``prefix.bin`` | Megatron's indexed pair |
| a folder, a file or a pattern of ``.arrow`` or ``.parquet`` | a Hugging Face data set on disk |

Opening reads lengths and numbers of targets. `Source.tokens` and `Source.labels` read one sample, so a rank touches
only what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..core.aliases import Floats, Ints
from ..core.errors import EvenloadError
from .content import Watch, fingerprint
from .documents import Documents
from .formats import Settings, open_documents
from .samples.cut import IGNORE, Cut, LongSamples, check_cut, cut, with_targets
from .samples.weights import with_weights
from .tokenizers import open_tokenizer

LossOn = Literal["completion", "all"]
WeightDivisor = Literal["tokens", "sequences"] | float


class Source:
    """Samples 0 .. num_samples-1 of documents that are cut; their lengths are known at once, their tokens on demand."""

    def __init__(
        self, documents: Documents, cut: Cut, vocab_size: int | None = None, divisor: float | Ints | None = None
    ) -> None:
        self._documents = documents
        self._cut = cut
        self._declared_vocab_size = vocab_size
        self.name = documents.name
        """Path, or the name of a built-in set."""
        self.lengths = cut.length
        """[num_samples] tokens of each sample; read-only."""
        self.targets = cut.targets
        """[num_samples] targets of each sample, read-only; None where every token but a sample's first is one."""
        numbers = documents.groups
        self.groups = None if numbers is None else np.unique(numbers[cut.document], return_inverse=True)[1]
        """[num_samples] group of each sample, 0 .. num_groups-1, read-only; None where each is by itself."""
        self.trunks = None
        """[num_samples] tokens that each begins with as all of its group do, and may share; read-only; None: none."""
        if documents.trunks is not None:
            trunks = np.minimum(documents.trunks[cut.document], cut.length - 1)
            self.trunks = np.where(cut.start == 0, trunks, 0)
        self.weight_sums = cut.weight_sums
        """[num_samples] what the weights of each sample's targets add up to, read-only; None: each weight is 1."""
        self.divisor = divisor
        """What a batch's weighted losses are divided by, or [num_samples] what each sample adds to that; None: what
        the weights add up to."""
        self._watch = Watch(self.name, documents.files, lambda: fingerprint(documents, cut))
        for column in (self.lengths, self.targets, self.groups, self.trunks, self.weight_sums):
            if column is not None:
                column.setflags(write=False)

    @cached_property
    def vocab_size(self) -> int:
        """Every token id is below it. May read all tokens the first time, where nothing else tells."""
        for known in (self._declared_vocab_size, self._documents.vocab_size):
            if known is not None:
                return known
        return self._documents.scan_vocab_size()

    def tokens(self, index: int) -> NDArray[np.int64]:
        """[length] token ids of one sample; the caller owns the array.

        Raises `EvenloadError` when an id is impossible or the data changed on disk.
        """
        document, tokens = self._read(index, self._documents.read)
        lowest, highest = int(tokens.min()), int(tokens.max())
        limit = self._declared_vocab_size
        if lowest < 0 or (limit is not None and highest >= limit):
            what = f"{self._documents.where(document)} has a token id that the vocabulary lacks"
            detail = f"{lowest if lowest < 0 else highest}, vocabulary of {'any size' if limit is None else limit}"
            raise EvenloadError(what, detail, "use the tokenizer and the vocabulary that the data was made with")
        return tokens

    def labels(self, index: int) -> NDArray[np.int64]:
        """[length] what each token of a sample counts as, `IGNORE` where it carries no loss, at its own place.

        The first token has none before it, so its label never counts. Raises as `tokens` does.
        """
        labels = self._read(index, self._documents.read_labels)[1]
        return labels if self.weight_sums is None else np.where(self.weights(index) == 0, IGNORE, labels)

    def weights(self, index: int) -> Floats:
        """[length] the weight of each token of a sample where it is a target, at its own place."""
        length, runs = int(self.lengths[index]), self._documents.weights
        if runs is None:
            return np.ones(length)
        first = int(self._places[self._cut.document[index]] + self._cut.start[index])
        return runs.of(first, first + length)

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """[num_documents] places of documents on the axis of all (`cut`)."""
        return np.cumsum(self._documents.lengths) - self._documents.lengths

    def _read(self, index: int, read: Callable[[int, int, int], NDArray[Any]]) -> tuple[int, NDArray[np.int64]]:
        """The document of a sample, and what ``read`` gives for it."""
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"sample {index} of {len(self.lengths)}")
        document, start, length = (int(part[index]) for part in (self._cut.document, self._cut.start, self.lengths))
        try:
            self._watch.look()
            return document, np.array(read(document, start, start + length), dtype=np.int64)
        except OSError as error:
            raise EvenloadError(f"cannot read {self._documents.where(document)}", str(error), "restore it") from error

    def report(self) -> dict[str, Any]:
        """Counts for a log or a table, ready for JSON: what there is, and what was left out and why."""
        return {
            "source": self.name,
            "documents": len(self._documents.lengths),
            "samples": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "targets": int((self.lengths - 1 if self.targets is None else self.targets).sum()),
            "without_target": int((self.lengths < 2 if self.targets is None else self.targets == 0).sum()),
            "longest": int(self.lengths.max()),
            **({} if self.groups is None else {"groups": int(self.groups.max()) + 1}),
            **({} if self.weight_sums is None else {"weight_sum": float(self.weight_sums.sum())}),
            **self._cut.counts,
            "tokens_left_out": self._cut.tokens_left_out,
            "fingerprint": self.fingerprint,
        }

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples in equal order: tells a resumed run that its data is another (`content`)."""
        return self._watch.first


def targets_of(source: Source) -> NDArray[np.int64]:
    """[num_samples] targets of each sample; of a source that names none each token but the first is one."""
    return np.maximum(source.lengths - 1, 0) if source.targets is None else source.targets


def open_source(
    spec: str,
    *,
    max_length: int | None,
    long_samples: LongSamples = "truncate",
    tokenizer: str = "bytes",
    text_key: str = "text",
    min_length: int = 2,
    vocab_size: int | None = None,
    append_eos: bool | None = None,
    loss_on: LossOn = "completion",
    group: str | None = None,
    weight_column: str | None = None,
    weight_divisor: WeightDivisor | None = None,
) -> Source:
    """Open the data that ``spec`` names (see the table above).

    ``max_length`` tokens a sample (None: no limit), ``min_length`` likewise (2: one token and its target); see `cut`
    for ``long_samples``. ``tokenizer`` is ``bytes``, a tokenizer.json or a folder, for text. ``text_key`` names the
    field or column; by default the kind of row tells. ``append_eos`` puts the tokenizer's end of sequence after texts
    (None: after completions alone). ``loss_on`` says which tokens of prompts and chats are targets. ``group`` names a
    field: samples of one value stay together. ``weight_column`` names one of the weights of targets, and
    ``weight_divisor`` says `Source.divisor`. ``vocab_size`` is the model's: data known to exceed it is refused here,
    any other token that does when it is read. Without it a tokenizer says which ids are possible.

    Raises `EvenloadError` when there is no such data, when it is empty or damaged, or when settings contradict.
    """
    check_cut(max_length, long_samples, min_length)
    words = open_tokenizer(tokenizer)
    documents = open_documents(spec, Settings(words, text_key, append_eos, loss_on == "all", group, weight_column))
    limit = vocab_size if vocab_size is not None or tokenizer == "bytes" else words.vocab_size
    if limit is not None and documents.vocab_size is not None and documents.vocab_size > limit:
        detail = f"ids up to {documents.vocab_size - 1}, vocabulary of {limit}"
        do = "use the tokenizer that the data was made with, or a model with a larger vocabulary"
        raise EvenloadError(f"the tokens of {spec} do not fit the vocabulary", detail, do)
    samples = cut(documents.lengths, max_length, long_samples, min_length)
    divisor = _divisor(weight_divisor, samples, documents)
    samples = with_targets(samples, documents.lengths, documents.spans)
    samples = with_weights(samples, documents.lengths, documents.spans, documents.weights)
    if not len(samples.length):
        left_out = "{empty} empty, {too_short} shorter than {min}, {dropped} longer than {max}".format(
            **samples.counts, min=min_length, max=max_length
        )
        detail = f"{len(documents.lengths)} documents: {left_out}"
        do = "check the data, data.max_length and data.long_samples"
        raise EvenloadError(f"{spec} has no sample to train on", detail, do)
    if samples.targets is not None and not samples.targets.any():
        detail = f"{len(samples.length)} samples without one token that carries loss"
        do = "check the data and its labels, data.max_length and data.loss_on"
        raise EvenloadError(f"{spec} has no target to train on", detail, do)
    return Source(documents, samples, limit, divisor)


def _divisor(asked: WeightDivisor | None, samples: Cut, documents: Documents) -> float | Ints | None:
    """`Source.divisor`: of each sample 1, or its tokens that carry loss, of weight 0 too, so that no weight decides."""
    if asked == "sequences":
        return np.ones(len(samples.length), dtype=np.int64)
    if asked != "tokens":
        return asked
    counted = with_targets(samples, documents.lengths, documents.weighed_spans or documents.spans).targets
    return np.maximum(samples.length - 1, 0) if counted is None else counted
