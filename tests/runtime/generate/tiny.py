"""A tiny attention model in float64, and what it says one by one: a whole forward for each token of each sample."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.runtime.attention.attention import packed_attention
from evenload.runtime.attention.pack import Pack, build_pack
from evenload.runtime.generate.engine import Decoder
from evenload.runtime.generate.request import Completion, Generation, Request
from torch import Tensor, nn

VOCABULARY, HEADS, GROUPS, DIM = 24, 4, 2, 8


class Tiny:
    """Two layers of attention over embeddings of tokens and places."""

    def __init__(self, seed: int = 0, dim: int = DIM, **scores: Any) -> None:
        draw, self.dim = torch.Generator().manual_seed(seed), dim

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64) / shape[0] ** 0.5

        def linear(*shape: int) -> nn.Linear:
            layer = nn.Linear(*shape, bias=False)
            layer.weight = nn.Parameter(weight(*shape).t().contiguous(), requires_grad=False)
            return layer

        width = HEADS * dim
        self.embedding, self.places = 6 * weight(VOCABULARY, width), 6 * weight(256, width)
        self.layers = [[linear(width, (HEADS + 2 * GROUPS) * dim), linear(width, width)] for _ in range(2)]
        self.linears = nn.ModuleList(chain(*self.layers))
        self.head = 4 * weight(width, VOCABULARY)
        self.scores = scores
        self.packs: list[Pack] = []

    def logits(self, pack: Pack, slots_R: Tensor | None = None) -> Tensor:
        self.packs.append(pack)
        if pack.cached:
            self.tables = pack.cached.cache.tables
        x_TC = self.embedded(pack)
        for number, (into, out) in enumerate(self.layers):
            heads = into(x_TC).unflatten(1, (-1, self.dim))
            q, k, v = heads.split([HEADS, GROUPS, GROUPS], dim=1)
            x_TC = torch.tanh(x_TC + out(packed_attention(q, k, v, pack, number, 0.5, **self.scores).flatten(1)))
        return (x_TC if slots_R is None else x_TC[slots_R]) @ self.head

    def embedded(self, pack: Pack) -> Tensor:
        return self.embedding[pack.tokens_T] + self.places[pack.positions_T]

    def decoder(self, **more: Any) -> Decoder:
        return Decoder(torch.device("cpu"), self.logits, **more)

    def whole(self, tokens: Sequence[int]) -> Tensor:
        """Logits of every token of one sequence, in a forward that keeps nothing."""
        ids = np.array(tokens)
        return self.logits(build_pack(MicroBatch((Slice(0, 0, len(ids)),), (0,)), lambda _: ids))


def refuse_other(got: dict[Any, Completion], want: dict[Any, Completion]) -> None:
    assert got.keys() == want.keys()
    for key, sample in want.items():
        assert (got[key].tokens, got[key].ended) == (sample.tokens, sample.ended)
        torch.testing.assert_close(torch.tensor(got[key].log_probs), torch.tensor(sample.log_probs), rtol=0, atol=1e-9)


def splitmix(word: int) -> int:
    """The finaliser, of Python's integers."""
    z = word % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


GOLDEN = 0x9E3779B97F4A7C15


def plain_noise(seed: int, prompt: int, sample: int, place: int, vocabulary: int) -> np.ndarray:
    state = 0
    for word in (seed, prompt, sample, place):
        state = splitmix(state + word + GOLDEN)
    bits = [splitmix(state + (token + 1) * GOLDEN) for token in range(vocabulary)]
    return -np.log(-np.log((np.array([b >> 12 for b in bits]) + 0.5) / 2**52))


def plain_token(logits_V: np.ndarray, noise_V: np.ndarray | None, settings: Generation) -> tuple[int, float]:
    """The rule in numpy: the token, and the model's log-probability of it."""
    log_probs = logits_V - np.logaddexp.reduce(logits_V)
    if not settings.sampling.temperature or noise_V is None:
        token = int(log_probs.argmax())
        return token, float(log_probs[token])
    scores = logits_V / settings.sampling.temperature
    ranked = np.argsort(-scores, kind="stable")
    if settings.sampling.top_k:
        scores[scores < scores[ranked[min(settings.sampling.top_k, len(ranked)) - 1]]] = -np.inf
    shares = np.exp(scores - np.logaddexp.reduce(scores))
    before = np.cumsum(shares[ranked]) - shares[ranked]
    if settings.sampling.top_p < 1:
        scores[ranked[before >= settings.sampling.top_p]] = -np.inf
    token = int((scores + noise_V).argmax())
    return token, float(log_probs[token])


def one_by_one(
    whole: Callable[[Sequence[int]], Tensor], requests: Sequence[Request], settings: Generation
) -> dict[tuple[int, int], Completion]:
    """Every sample by itself: a forward of the whole sequence for each token."""
    samples = {}
    for request in requests:
        for number in request.samples:
            tokens, log_probs, how = list(request.tokens), [], "limit"
            for _ in range(request.limit):
                logits_V = whole(tokens)[-1].double().numpy()
                noise_V = plain_noise(settings.seed, request.number, number, len(tokens), len(logits_V))
                token, log_prob = plain_token(logits_V, noise_V, settings)
                tokens.append(token)
                log_probs.append(log_prob)
                if token in settings.end_tokens or settings.stops(tokens[len(request.tokens) :]):
                    how = "end" if token in settings.end_tokens else "stop"
                    break
            new = tuple(tokens[len(request.tokens) :])
            samples[request.number, number] = Completion(request.number, number, new, tuple(log_probs), how)  # type: ignore[arg-type]
    return samples
