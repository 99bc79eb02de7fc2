"""`evenload.train` and `evenload.verify` answer what the verbs answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evenload
import pytest
from evenload.core.recipe.recipe import shipped
from evenload.training import api
from evenload.training.launching import launch

TEXT = """
model: {num_layers: 1, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}
data: {max_length: 128, long_samples: truncate}
parallel: {dp: 2}
train: {steps: 2, global_batch_size: 4, lr: 1.0e-05}
plugins: {packing: {enabled: true, max_tokens: 256}}
"""
RATES = ("seconds", "_s", "_ms")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(TEXT)
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize("name", sorted(shipped()))
def test_ranks_read_the_recipe_that_was_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(verb: str, chosen: Any, words: Any, num_ranks: int | None, progress: Any, **arguments: Any) -> Any:
        assert (words[0], words[2:], num_ranks, arguments) == (
            verb,
            ("--steps", "2"),
            3,
            {"steps": 2, "weights": False, "generation": False, "prompts": None},
        )
        return {"same": evenload.load_recipe(words[1]).model_dump() == chosen.model_dump()}

    monkeypatch.setattr(api, "on_ranks", read)
    for given in (name, evenload.load_recipe(name, ["train.lr=1.0e-05", "parallel.dp=2"])):
        assert evenload.verify(given, 2, nproc=3) == {"same": True}


def test_a_wrong_request_is_refused_before_ranks_start(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "launch", lambda *words: pytest.fail("ranks were started"))
    monkeypatch.chdir(recipe.parent)
    chosen = evenload.load_recipe(recipe)
    for ask in (
        lambda: evenload.train("no-such-recipe"),
        lambda: evenload.train(chosen, against=["no_such_baseline"]),
        lambda: evenload.train(chosen, nproc=3),
        lambda: evenload.train(chosen, nproc=True),
        lambda: evenload.train(chosen.changed({"train.export": str(recipe)})),
        lambda: evenload.verify(chosen, steps=0),
        lambda: evenload.verify(chosen, weights=True, generation=True),
        lambda: evenload.verify(chosen, prompts=recipe),
        lambda: evenload.verify(chosen, generation=True, prompts=recipe.with_name("nowhere.jsonl")),
    ):
        with pytest.raises(evenload.EvenloadError):
            ask()


def test_a_rank_works_here_and_rank_0_alone_tells(monkeypatch: pytest.MonkeyPatch, recipe: Path) -> None:
    class Verbs:
        @staticmethod
        def train(recipe: Any, against: Any, progress: Any) -> Any:
            progress("evenload", 1, 2, "")
            return {"against": against}

    monkeypatch.setattr(launch, "import_module", lambda *_: Verbs)
    said: list[Any] = []
    for rank in ("0", "1"):
        variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        answer = evenload.train(recipe, "stock", progress=lambda *words: said.append(words))
        assert answer == {"against": ("stock",)}
    assert said == [("evenload", 1, 2, "")]


def numbers(value: Any, name: str = "") -> Any:
    """What of a result is the same in every run."""
    if isinstance(value, dict):
        return {key: numbers(below, key) for key, below in value.items() if not key.endswith(RATES)}
    return value


@pytest.mark.slow
def test_answers_are_those_of_the_verbs(recipe: Path, forged: Callable[..., Any]) -> None:

    said: list[Any] = []
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(evenload.train(recipe, progress=lambda *words: said.append(words)))
    )
    thread.start()
    answers.append(evenload.verify(evenload.load_recipe(recipe), 2))
    thread.join()
    trained, proven = sorted(answers, key=lambda answer: "exact" in answer)
    assert [words[:3] for words in said] == [("evenload", done, 2) for done in range(3)]
    of_verb = json.loads(forged(recipe.parent, "train", "recipe.yaml", "--json").stdout)
    assert trained.keys() == of_verb.keys()
    assert [(row["loss"], row["tokens"]) for row in trained["steps"]] == [
        (row["loss"], row["tokens"]) for row in of_verb["steps"]
    ]
    of_verb = json.loads(forged(recipe.parent, "verify", "recipe.yaml", "--steps", "2", "--json").stdout)
    assert proven["exact"]
    assert numbers(proven) == numbers(of_verb)


@pytest.mark.slow
def test_what_ends_the_ranks_is_an_error_here(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = evenload.load_recipe(recipe, [f"log.jsonl={tmp_path}"])
    with pytest.raises(evenload.EvenloadError, match="train failed on its ranks"):
        evenload.train(chosen)
    assert "log.jsonl cannot be written" in capfd.readouterr().err


@pytest.mark.slow
def test_samples_are_proven_as_by_the_verb(recipe: Path, forged: Callable[..., Any]) -> None:
    few, prompts = ("generate.max_new_tokens=4", "generate.slots=3"), recipe.parent / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f("}\n{"prompt": "import "}\n')
    proven = evenload.verify(evenload.load_recipe(recipe, few), generation=True, prompts=prompts)
    words = ("--generate", "--prompts", "prompts.jsonl")
    of_verb = json.loads(forged(recipe.parent, "verify", "recipe.yaml", *few, *words, "--json").stdout)
    assert proven
    assert proven["exact"]
    assert numbers(proven) == numbers(of_verb)
