"""Which samples a rule keeps, from whole lengths and the scores at all borders: what tests compare machines with."""

from evenload.plugins.rollout import Collect

Scores = dict[tuple[int, int], float]
"""Score of (sample, border)."""


def plain(rule: Collect, lengths: list[int], scores: Scores) -> tuple[list[int], dict[int, int]]:
    """What is kept, and what is pruned at how many tokens: from whole lengths, border by border."""
    pruned: dict[int, int] = {}
    for border in range(rule.every, max(lengths) + 2 * rule.every, rule.every):
        ended = sorted((n, i) for i, n in enumerate(lengths) if n <= border and i not in pruned)
        if len(ended) >= rule.keep:
            return [i for _, i in ended[: rule.keep]], pruned
        if rule.prune is None:
            continue
        live = [i for i, n in enumerate(lengths) if n > border and i not in pruned]
        most = len(ended) + len(live) - rule.keep
        if ended:
            n, first = ended[0]
            bar = scores[first, -(-n // rule.every)]
        else:
            bar, most = rule.prune.below, min(most, rule.prune.most - len(pruned))
        bad = sorted((scores[i, border // rule.every], i) for i in live if scores[i, border // rule.every] < bar)
        pruned |= {i: border for _, i in bad[: max(most, 0)]}
    raise AssertionError
