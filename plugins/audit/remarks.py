"""What is computed as it should be and is seldom meant: samples that ranks repeat, ends that nothing is trained to say,
targets of one token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from torch import Tensor

_FEW = 20
"""Targets of a step of which a share says nothing."""


class HeldSamples(NamedTuple):
    """What a rank tells of its samples."""

    digests: list[bytes]
    """Of the tokens of each."""
    num_ended: int
    """How many train their last token."""
    targets: dict[int, int]
    """How often each token is a target."""

    @classmethod
    def of(cls, samples: Iterable[tuple[Tensor, Tensor]]) -> HeldSamples:
        """The samples of a rank: tokens [L], and whether each predicts a target [L]."""
        digests, num_ended, targets = list[bytes](), 0, Counter[int]()
        for tokens_L, trained_L in samples:
            digests.append(blake2b(tokens_L.cpu().numpy().tobytes(), digest_size=16).digest())
            num_ended += bool(trained_L[-2:-1].any())
            targets.update(tokens_L[1:][trained_L[:-1]].tolist())
        return cls(digests, num_ended, dict(targets))


def remarks(of_ranks: Sequence[HeldSamples]) -> list[str]:
    """What is odd about the samples of a step, in sentences."""
    said, ranks_of = [], Counter(digest for one in of_ranks for digest in {*one.digests})
    if 2 * (repeated := sum(count > 1 for count in ranks_of.values())) > len(ranks_of):
        said.append(
            f"ranks hold the same {repeated} of {len(ranks_of)} samples: nothing divides the data among them "
            "(a DistributedSampler, split_dataset_by_node and accelerator.prepare do)"
        )
    if ranks_of and not any(one.num_ended for one in of_ranks):
        said.append(
            "no sample trains its last token, so nothing teaches the model to stop: the end of sequence may be the "
            "padding token too, whose labels are masked"
        )
    targets: Counter[int] = sum((Counter(one.targets) for one in of_ranks), Counter())
    if (total := targets.total()) >= _FEW:
        ((token, count),) = targets.most_common(1)
        if 2 * count > total:
            said.append(f"{count / total:.0%} of targets are token {token}: a placeholder or padding carries loss")
    return said
