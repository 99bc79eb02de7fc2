"""A rank that fails in a ring or an all-to-all: the job ends with one clear message, or waits; it never hangs."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from harness.forge import free_port

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("exchange_fault_jobs.py")


class Ended(NamedTuple):
    """How a job of three ranks ended."""

    codes: list[int]
    outputs: list[str]

    @property
    def message(self):
        """The one message of the job, on whichever rank."""
        assert sum(text.count("evenload: ") for text in self.outputs) == 1, self
        return next(text for text in self.outputs if "evenload: " in text)


@pytest.fixture
def job(forge, tmp_path):
    def ended(case):
        of_job = {"place": str(tmp_path), "script": str(SCRIPT), "arguments": [case], "ranks": 3, "port": free_port()}
        codes = forge("megatron").ask("job", {**of_job, "planted": False, "outputs": str(tmp_path), "limit_s": 60})
        said = [[(tmp_path / f"{stream}.{rank}").read_text() for stream in ("err", "out")] for rank in range(3)]
        return Ended(codes, ["".join(texts) for texts in said])

    return ended


def test_a_slow_rank_is_waited_for_and_changes_no_bit(job):
    ended = job("slow")
    assert ended.codes == [0, 0, 0], ended
    results = [json.loads(text.splitlines()[-1]) for text in ended.outputs]
    assert all(undisturbed == slow == results[0][0] for undisturbed, slow in results)


@pytest.mark.parametrize(
    ("case", "where"), [("hung", "ward of micro-batch 0'"), ("experts hung", "experts of layer 1'")]
)
def test_a_rank_that_never_comes_back_ends_the_job_and_shows_where_it_stands(case, where, job):
    ended = job(case)
    assert ended.codes == [1, 1, 1], ended
    assert "rank 1 of 3" in ended.message
    assert "is stuck in '" in ended.message
    assert where in ended.message
    assert "time.sleep(1000)" in ended.message


def test_ranks_that_disagree_about_what_comes_next_end_with_what_each_runs(job):
    ended = job("other order")
    assert ended.codes == [1, 1, 1], ended
    assert "ranks that share a micro-batch run different passes" in ended.message
    assert "rank 1: " in ended.message


def test_a_rank_that_is_killed_in_an_all_to_all_of_experts_is_named_with_its_layer(job):
    ended = job("experts killed")
    assert ended.codes[1] == -9, ended
    assert {ended.codes[0], ended.codes[2]} == {1}, ended
    assert "rank 1 of 3" in ended.message
    assert "experts of layer 1'" in ended.message


def test_ranks_that_share_experts_and_run_unlike_plans_end_before_a_token_moves(job):
    ended = job("experts other plan")
    assert ended.codes == [1, 1, 1], ended
    assert "ranks that share experts run different passes" in ended.message
    assert "rank 1 runs pass 0 of plan" in ended.message
