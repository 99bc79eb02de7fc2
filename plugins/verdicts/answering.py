"""The process of a judge that is a function: ``python -m evenload.plugins.verdicts.answering module:name``."""

from __future__ import annotations

import json
import os
import sys

from ...core.errors import EvenloadError
from ...core.input.user_function import user_function


def answer_all(word: str) -> None:
    """Answer each question on stdin by the function; what it prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        function = user_function(word, "--judge")
    except EvenloadError as error:
        sys.exit(str(error))
    for line in sys.stdin:
        question = json.loads(line)
        value = function(question["prompt"], question["first"], question["second"])
        answers.write(json.dumps(value, default=float) + "\n")
        answers.flush()


if __name__ == "__main__":
    answer_all(sys.argv[1])
