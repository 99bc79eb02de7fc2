"""Ranks without evenload, or with another recipe, are named by those that would wait for them."""

from __future__ import annotations

import time

import torch.distributed as dist
from evenload.api import load_plugins
from evenload.core.errors import RankError
from evenload.core.recipe.recipe import parse
from evenload.integrations.unmodified import roll_call
from evenload.patches import session
from evenload.runtime.world import agreement
from torch.distributed.distributed_c10d import _get_default_store

CAP = {"trainer": "transformers", "plugins": {"packing": {"enabled": True, "max_tokens": 64}}}
OTHER_CAP = {"trainer": "transformers", "plugins": {"packing": {"enabled": True, "max_tokens": 128}}}
ELSEWHERE = CAP | {"data": {"source": "/another/place/on/this/node.jsonl"}}


def cleared() -> int:
    """This rank, whose word of an earlier case is taken away; no rank goes on before that."""
    load_plugins()
    agreement.before_first = None
    _get_default_store().delete_key(f"evenload/runs/{dist.get_rank()}")
    dist.barrier()
    return dist.get_rank()


def asks(recipes: list, wait_s: float, late_s: list[float]) -> str:
    """What a rank reads that enables its recipe, if it has one, comes so late, and asks all others for their number."""
    rank = cleared()
    roll_call._WAIT_S = wait_s
    time.sleep(late_s[rank])
    if recipes[rank] is None:
        return "stock"
    with session.enabled(parse(recipes[rank])):
        try:
            return str(agreement.everyone(rank) if None not in recipes else agreement.agree(b"1" * 16, "plans", 1))
        except RankError as error:
            return str(error)


def leaves_word_with_its_group() -> tuple[bool, bool]:
    """Whether there is word of this rank once its group is made by a script, and a question once evenload is off."""
    rank = cleared()
    with session.enabled(parse(CAP)):
        _get_default_store().delete_key(f"evenload/runs/{rank}")
        dist.init_process_group.__wrapped__, before = lambda *_, **__: None, dist.init_process_group.__wrapped__
        try:
            dist.init_process_group("gloo")
        finally:
            dist.init_process_group.__wrapped__ = before
        word = _get_default_store().check([f"evenload/runs/{rank}"])
    return word, agreement.before_first is not None


def test_all_go_on_where_all_run_the_same_plugins_wherever_their_data_lies_and_however_late(world):
    assert world(2).run(asks, [CAP, ELSEWHERE], 20.0, [0.0, 0.5]) == ["[0, 1]", "[0, 1]"]


def test_a_rank_without_evenload_is_named_by_the_other(world):
    told, stock = world(2).run(asks, [CAP, None], 0.3, [0.0, 0.0])
    assert told.startswith("rank 1 of 2 runs without evenload\n  found: no word in 0.3 s\n  do: start the command")
    assert stock == "stock"


def test_ranks_of_unlike_recipes_read_the_same(world):
    told, same = world(2).run(asks, [CAP, OTHER_CAP], 0.3, [0.0, 0.0])
    assert told == same
    assert told.startswith("the ranks run different versions of evenload, or recipes with other plugins\n")
    assert "rank 0: evenload 0." in told
    assert "; rank 1: evenload 0." in told


def test_a_rank_leaves_word_when_its_group_is_made(world):
    assert world(2).run(leaves_word_with_its_group) == [(True, False)] * 2
