"""What data bring along runs in another process, which is ended behind its CPU seconds and outlives no failure."""

import functools
import json
import os
import re
import signal

import pytest
from evenload.core.input.sandbox import Budget, SandboxError, _process, bounded

ENDLESS = ("(a+)+$", "a" * 40 + "!")


def test_a_function_gives_in_the_sandbox_what_it_gives_here():
    assert bounded(Budget(), json.loads, '{"a": [1, null]}') == {"a": [1, None]}
    assert bounded(Budget(), os.getpid) != os.getpid()
    assert bounded(Budget(), os.getpid) == bounded(Budget(), os.getpid)


def test_what_fails_there_is_an_error_here_and_the_process_goes_on():
    pid = bounded(Budget(), os.getpid)
    with pytest.raises(SandboxError, match="JSONDecodeError: Expecting"):
        bounded(Budget(), json.loads, "{'")
    with pytest.raises(SandboxError, match="MemoryError"):
        bounded(Budget(), bytes, 3 << 30)
    with pytest.raises(SandboxError, match="not JSON serializable"):
        bounded(Budget(), bytes, 1)
    deep = functools.reduce(lambda inner, _: [inner], range(20_000), [])
    with pytest.raises(SandboxError, match="RecursionError"):
        bounded(Budget(), json.dumps, deep)
    assert bounded(Budget(), os.getpid) == pid


def test_one_that_takes_too_long_is_ended_and_the_next_question_has_an_answer():
    budget = Budget(0.2)
    pid = bounded(budget, os.getpid)
    with pytest.raises(SandboxError, match="takes too long"):
        bounded(budget, re.match, *ENDLESS)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(SandboxError, match="takes too long"):
        bounded(budget, os.getpid)
    assert bounded(Budget(), os.getpid) != pid


def test_seconds_of_all_questions_count_and_what_they_are_about_adds_some():
    budget = Budget(0.3, per_call_s=1.0, per_byte_s=1.0)
    bounded(budget, str, "a" * 1000)
    assert 1000 < budget.left_s < 1200
    spent = Budget(5.0)
    bounded(spent, re.match, ENDLESS[0], "a" * 22 + "!")
    assert spent.left_s < 5.0


def test_a_process_that_is_killed_is_replaced():
    os.kill(bounded(Budget(), os.getpid), signal.SIGKILL)
    with pytest.raises(SandboxError, match="ended with -9"):
        bounded(Budget(), os.getpid)
    assert bounded(Budget(), str, 1) == "1"


def test_a_fork_has_a_process_of_its_own():
    pid, (read, write) = bounded(Budget(), os.getpid), os.pipe()
    if not os.fork():
        os.write(write, str(bounded(Budget(), os.getpid)).encode())
        os._exit(0)
    os.wait()
    assert int(os.read(read, 20)) != pid == _process(os.getpid()).pid
