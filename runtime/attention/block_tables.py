"""Which blocks of a key-value cache hold the tokens of which sequence (PagedAttention, Kwon et al., arXiv 2309.06180,
section 4): bookkeeping alone, of Python integers.

A sequence takes blocks as it grows and gives them back when it ends. Sequences that begin alike share their common
blocks, of which only whole ones are shared: nobody writes into what another one reads.
"""

from __future__ import annotations


class BlockTables:
    """The blocks of the sequences in a cache.

    Args:
        block_tokens: of one block.
        cap_tokens: that all blocks together may have; None: as many as there is memory for.
    """

    def __init__(self, block_tokens: int, cap_tokens: int | None = None) -> None:
        self.block_tokens = block_tokens
        self._cap = None if cap_tokens is None else cap_tokens // block_tokens
        self._blocks: dict[int, list[int]] = {}
        self._readers: list[int] = []
        """Sequences that have a block, by its number."""
        self._free: list[int] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that were ever taken, free ones too."""
        return len(self._readers)

    @property
    def num_taken(self) -> int:
        return len(self._readers) - len(self._free)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._blocks

    def __getitem__(self, sequence: int) -> list[int]:
        """The blocks of a sequence in the order of its tokens."""
        return self._blocks[sequence]

    def size(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self.block_tokens)

    def holds(self, tokens: int, *, besides: int = 0) -> bool:
        """Whether so many tokens, and some blocks besides, can ever be there together."""
        return self._cap is None or self.size(tokens) + besides <= self._cap

    def at_most(self, blocks: int) -> int:
        """So many, or as many as there can be."""
        return blocks if self._cap is None else min(blocks, self._cap)

    def has_free(self, blocks: int) -> bool:
        """Whether so many are free now."""
        return self._cap is None or self.num_taken + blocks <= self._cap

    def grow(self, sequence: int, tokens: int) -> bool:
        """Let a sequence, that may be new, have so many tokens; False, and nothing is taken, where the cap forbids."""
        own = self._blocks.setdefault(sequence, [])
        missing = self.size(tokens) - len(own)
        if missing > 0 and not self.has_free(missing):
            return False
        own += [self._take() for _ in range(missing)]
        return True

    def shrink(self, sequence: int, tokens: int) -> None:
        """Let a sequence have so many tokens at most; blocks after those are given back."""
        own = self._blocks[sequence]
        while len(own) > self.size(tokens):
            self._leave(own.pop())

    def fork(self, parent: int, child: int, tokens: int) -> int:
        """Let a new sequence share the whole blocks of the first tokens of another one, the number of which it
        gives."""
        shared = self._blocks[parent][: tokens // self.block_tokens]
        for block in shared:
            self._readers[block] += 1
        self._blocks[child] = list(shared)
        return len(shared)

    def free(self, sequence: int) -> None:
        """Give back what a sequence has, where no other one shares it."""
        for block in self._blocks.pop(sequence):
            self._leave(block)

    def _leave(self, block: int) -> None:
        self._readers[block] -= 1
        if not self._readers[block]:
            self._free.append(block)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = len(self._readers)
            self._readers.append(0)
        self._readers[block] += 1
        return block
