"""Selections against references written from their equations, whatever the order of the pool."""

import heapq
import json
import math

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.policies import Pool, chosen_policy, started, stepped
from evenload.core.registry import data_policies
from evenload.plugins.data.draws import drawn, largest, uniform
from evenload.plugins.data.neighbours import Tsds, transport_probabilities
from evenload.plugins.data.selects import DeltaLoss, LossThirds, progress_probabilities, third_probabilities

load_plugins()
RNG = np.random.default_rng(7)
NAMES = sorted(data_policies("select"))
THIRDS = ("low", "medium", "high")


def chosen(name, **settings):
    return chosen_policy("select", name, settings, data_policies("select"))


def pool(count=60, take=12, seed=1):
    rng = np.random.default_rng(seed)
    return Pool(
        rng.permutation(10 * count)[:count],
        take,
        seed=5,
        update=3,
        losses=rng.lognormal(0, 1, count),
        gradients=rng.normal(size=(count, 8)),
        query_gradients=rng.normal(size=(7, 8)),
        tasks=np.array([0, 0, 0, 1, 1, 2, 2]),
        embeddings=rng.normal(size=(count, 3)) / 3,
        queries=rng.normal(size=(4, 3)) / 3,
    )


def shuffled(whole, order):
    own = {name: getattr(whole, name)[order] for name in ("numbers", "losses", "gradients", "embeddings")}
    return whole._replace(**own)


def select(policy, first, then):
    state, last = started(policy, first)
    _, numbers = stepped(policy, state, then, last)
    return numbers.tolist()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cluster_less"])
def test_a_selection_does_not_depend_on_the_order_of_its_pool(name):
    whole, policy = pool(), chosen(name)
    numbers = select(policy, whole, whole._replace(losses=whole.losses * RNG.uniform(0.5, 1.2, 60)))
    now = whole._replace(losses=whole.losses * 0.9)
    expected = select(policy, whole, now)
    assert len(set(numbers)) == 12
    for _ in range(3):
        order = RNG.permutation(60)
        assert select(policy, shuffled(whole, RNG.permutation(60)), shuffled(now, order)) == expected


def test_uniform_numbers_depend_on_seed_update_and_number_alone():
    numbers = np.arange(20000)
    values = uniform(numbers, 3, 4)
    assert uniform(numbers[::-1], 3, 4)[::-1].tolist() == values.tolist()
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    for other in (uniform(numbers, 4, 4), uniform(numbers, 3, 5)):
        assert abs(np.corrcoef(values, other)[0, 1]) < 0.03


def test_draws_without_replacement_have_the_chances_of_one_after_the_other():
    chances = np.array([0.5, 0.3, 0.2, 0.0])
    counts = {}
    for update in range(4000):
        pair = tuple(drawn(np.arange(4), chances, 2, seed=1, update=update).tolist())
        counts[pair] = counts.get(pair, 0) + 1
    for (first, second), count in counts.items():
        expected = chances[first] * chances[second] / (1 - chances[first])
        assert count / 4000 == pytest.approx(expected, abs=0.025)
    assert len(counts) == 6
    with pytest.raises(ValueError, match="4 samples of 3 that may be drawn"):
        drawn(np.arange(4), chances, 4, seed=1, update=0)


@pytest.mark.parametrize("third", ["low", "medium", "high"])
def test_loss_weighs_one_third_five_times(third):
    losses = pool(200).losses
    ranked = sorted(losses)
    bounds = []
    for part in (0.33, 0.66):
        at = part * (len(ranked) - 1)
        low = ranked[math.floor(at)]
        bounds.append(low + (at - math.floor(at)) * (ranked[math.floor(at) + 1] - low))
    chance = {
        "low": [5 if loss <= bounds[0] else 1 for loss in losses],
        "medium": [5 if bounds[0] < loss <= bounds[1] else 1 for loss in losses],
        "high": [5 if loss > bounds[1] else 1 for loss in losses],
    }[third]
    odds = [one**0.5 for one in chance]
    ours = third_probabilities(losses, LossThirds(third=third, temperature=2.0))
    np.testing.assert_allclose(ours, [one / sum(odds) for one in odds], rtol=1e-12)


def test_every_sample_is_in_one_third_also_where_its_loss_is_a_border():
    """Of five losses the quantiles 1/4 and 3/4 are losses themselves, and of equal ones all are in one third."""
    for losses in ([5.0, 1.0, 4.0, 2.0, 3.0], [1.0, 2.0, 2.0, 3.0, 3.0], [2.0] * 5):
        inside = []
        for third in THIRDS:
            chances = third_probabilities(np.array(losses), LossThirds(third=third, bounds=(0.25, 0.75)))
            odds = chances / chances.min()
            inside.append(odds > 1 if odds.max() > 1 else np.full(5, third == "low"))
        assert np.sum(inside, axis=0).tolist() == [1] * 5
    low, medium, _ = (third_probabilities(np.arange(5.0), LossThirds(third=t, bounds=(0.25, 0.75))) for t in THIRDS)
    assert (np.flatnonzero(low > low.min()).tolist(), np.flatnonzero(medium > medium.min()).tolist()) == (
        [0, 1],
        [2, 3],
    )


@pytest.mark.parametrize("update", [0, 3, 5, 9, 10])
def test_delta_loss_opens_its_window_by_the_update(update):
    numbers, progress = np.arange(100), np.random.default_rng(2).normal(0.3, 1, 100)
    start = int(100 * 0.8 / (1 + math.exp(-10 * (update / 10 - 0.5))))
    odds = [0.0] * 100
    for place, (gain, number) in enumerate(sorted((-d, n) for n, d in enumerate(progress))):
        odds[number] = 1.0 if start <= place < start + 20 and -gain >= 0 else 0.025
    ours = progress_probabilities(numbers, progress, update, DeltaLoss(updates=10))
    np.testing.assert_allclose(ours, [one / sum(odds) for one in odds], rtol=1e-12)


def test_a_sample_that_stands_still_is_in_the_window_of_progress_and_one_that_falls_back_is_not():
    ours = progress_probabilities(np.arange(5), np.array([0.0, 3.0, -1e-9, 0.0, 2.0]), 0, DeltaLoss(width=1.0))
    assert (ours * 4.025).tolist() == pytest.approx([1.0, 1.0, 0.025, 1.0, 1.0])


def test_of_equal_scores_the_least_numbers_are_taken():
    numbers, scores = np.array([9, 4, 7, 1, 3, 8]), np.array([0.5, 0.5, 2.0, 0.5, 0.25, 0.5])
    assert largest(numbers, scores, 3).tolist() == [7, 1, 4]
    assert largest(numbers[::-1], scores[::-1], 3).tolist() == [7, 1, 4]


def test_delta_loss_remembers_the_first_losses_by_sample():
    first = pool()
    now = first._replace(losses=first.losses - np.linspace(-1, 2, 60), update=0)
    policy = chosen("delta_loss", updates=10, outside=1e-9)
    state, last = started(policy, first)
    _, numbers = stepped(policy, json.loads(json.dumps(state)), shuffled(now, RNG.permutation(60)), last)
    best = first.numbers[np.argsort(-np.linspace(-1, 2, 60))[:12]]
    assert set(numbers.tolist()) == set(best.tolist())


def test_less_takes_the_best_task_of_every_sample():
    whole = pool()
    scores = []
    for own in whole.gradients:
        by_task = {}
        for wanted, task in zip(whole.query_gradients, whole.tasks, strict=True):
            cosine = float(own @ wanted) / math.sqrt(float(own @ own) * float(wanted @ wanted))
            by_task.setdefault(int(task), []).append(cosine)
        scores.append(max(sum(values) / len(values) for values in by_task.values()))
    expected = whole.numbers[np.argsort(-np.array(scores))[:12]]
    assert select(chosen("less"), whole, whole) == expected.tolist()


def test_online_takes_what_is_learnable():
    whole = pool()
    assert select(chosen("online"), whole, whole) == whole.numbers[np.argsort(-whole.losses)[:12]].tolist()
    reference = RNG.lognormal(0, 1, 60)
    learnable = whole.numbers[np.argsort(-(whole.losses - reference))[:12]]
    assert select(chosen("online"), whole, whole._replace(reference=reference)) == learnable.tolist()


def test_near_takes_turns_among_queries():
    whole, taken = pool(), []
    ranked = [
        sorted(range(60), key=lambda i: (math.dist(query, whole.embeddings[i]), whole.numbers[i]))
        for query in whole.queries
    ]
    for place in range(60):
        for own in ranked:
            if own[place] not in taken:
                taken.append(own[place])
    assert select(chosen("near"), whole, whole) == whole.numbers[taken[:12]].tolist()


def transport(whole, alpha, scale, width):
    """TSDS by a heap, a neighbour at a time."""
    rows, queries = whole.embeddings, whole.queries
    count, sigma, chances = len(queries), 0.75, [0.0] * len(rows)

    def density(point):
        near = sorted(math.dist(point, row) for row in rows)[:30]
        return sum(max(0.0, 1 - (d / sigma) ** 2) for d in near)

    near = [
        sorted((math.dist(query, row), whole.numbers[i], i) for i, row in enumerate(rows))[:width] for query in queries
    ]
    parts = [[1 / density(rows[i]) for *_, i in own] for own in near]
    heap = [(own[0], 0, j) for j, own in enumerate(parts)]
    heapq.heapify(heap)
    spent = [near[j][0][0] * parts[j][0] for j in range(count)]
    costs, stop = [0.0] * count, 0.0
    while heap:
        stop, place, j = heapq.heappop(heap)
        costs[j] = near[j][place + 1][0] * stop - spent[j]
        if alpha / scale * sum(costs) >= (1 - alpha) * count:
            break
        if place < width - 2:
            heapq.heappush(heap, (stop + parts[j][place + 1], place + 1, j))
            spent[j] += near[j][place + 1][0] * parts[j][place + 1]
    for j in range(count):
        left = 1 / count
        for place, part in enumerate(parts[j]):
            mass = left if place == width - 1 else min(left, part / count / stop)
            chances[near[j][place][2]] += mass
            left -= mass
    return chances


@pytest.mark.parametrize(
    ("alpha", "scale", "width"), [(0.6, 5.0, 60), (0.9, 1.0, 20), (0.05, 5.0, 8), (0.999, 0.01, 30)]
)
def test_tsds_is_its_transport(alpha, scale, width):
    whole = pool(60)
    settings = Tsds(alpha=alpha, scale=scale, neighbours=width, density_neighbours=30)
    ours = transport_probabilities(whole, settings)
    np.testing.assert_allclose(ours, transport(whole, alpha, scale, width), rtol=1e-12, atol=1e-15)
    assert math.fsum(ours) == pytest.approx(1, abs=1e-12)


def test_near_duplicates_do_not_crowd_tsds():
    rows = np.concatenate([np.zeros((50, 2)), np.array([[0.05, 0.0], [0.0, 0.06], [-0.04, 0.05]])])
    crowd = Pool(np.arange(53), 4, embeddings=rows, queries=np.array([[0.01, 0.0]]))
    chances = transport_probabilities(crowd, Tsds(sigma=0.03, alpha=0.2))
    assert chances[:50].sum() < 0.5, "fifty copies count as one"


def test_a_cluster_has_the_mean_score_of_its_representatives():
    """One that lies along the gradient wanted does not outweigh two against it; other members count nothing."""
    rng = np.random.default_rng(4)
    rows = np.repeat(np.array([[0.0, 0.0], [90.0, 0.0], [0.0, 90.0]]), 4, axis=0) + rng.normal(size=(12, 2)) / 9
    whole = Pool(rng.permutation(12), 8, seed=1, embeddings=rows, query_gradients=np.array([[1.0, 0.0]]))
    policy = chosen("cluster_less", cluster_size=4, representatives=3)
    state, last = started(policy, whole._replace(gradients=np.zeros((9, 2))))
    clusters = [cluster for cluster, _ in state["representatives"]]
    assert sorted(clusters.count(cluster) for cluster in range(3)) == [3, 3, 3]
    cosines = {0: (1.0, -0.5, -0.4), 1: (0.1, 0.1, 0.1), 2: (0.2, 0.4, -0.4)}
    means = {cluster: float(np.mean(own)) for cluster, own in cosines.items()}
    left = {cluster: list(own) for cluster, own in cosines.items()}
    along = [left[cluster].pop(0) for cluster in clusters]
    gradients = np.array([[7 * c, 7 * math.sqrt(1 - c * c)] for c in along])
    _, numbers = stepped(policy, state, whole._replace(gradients=gradients), last)
    owner = dict(zip(state["numbers"], state["clusters"], strict=True))
    in_turn = sorted(means, key=lambda cluster: (-round(means[cluster], 12), cluster))
    assert [owner[number] for number in numbers.tolist()] == [cluster for cluster in in_turn for _ in range(4)][:8]


@pytest.mark.parametrize(
    ("name", "missing"), [("less", "gradients"), ("near", "queries"), ("tsds", "embeddings"), ("loss", "losses")]
)
def test_a_pool_without_scores_is_refused(name, missing):
    with pytest.raises(EvenloadError, match=f"'{name}' needs what is not there"):
        started(chosen(name), pool()._replace(**{missing: None}))


def test_a_selection_of_too_many_keeps_the_last_one(caplog):
    policy, whole = chosen("online"), pool()
    state, last = started(policy, whole)
    with caplog.at_level("WARNING", logger="evenload"):
        _, numbers = stepped(policy, state, whole._replace(losses=np.full(60, math.nan)), last)
    assert numbers.tolist() == last.tolist()
    assert "the select policy 'online' failed" in caplog.text
