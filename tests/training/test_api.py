"""`evenload.train` and `evenload.verify` answer what the verbs answer."""

import threading

import evenload
import pytest
from evenload.core.recipe.recipe import shipped
from evenload.training import api
from evenload.training.launching import launch
from harness.cases import only_full

TEXT = """
model: {num_layers: 1, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}
data: {max_length: 128, long_samples: truncate}
parallel: {dp: 2}
train: {steps: 2, global_batch_size: 4, lr: 1.0e-05}
plugins: {packing: {enabled: true, max_tokens: 256}}
"""
RATES = ("seconds", "_s", "_ms")


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text(TEXT)
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize("name", sorted(shipped()))
def test_ranks_read_the_recipe_that_was_given(name, monkeypatch):
    def read(work, chosen, words, num_ranks, progress, **arguments):
        assert (words[0], num_ranks) == (work.verb, 3)
        same = evenload.load_recipe(words[1]).model_dump() == chosen.model_dump()
        return same, words[2:], arguments

    monkeypatch.setattr(api, "on_ranks", read)
    plain = {"steps": 2, "weights": False, "generation": False, "prompts": None}
    for given in (name, evenload.load_recipe(name, ["train.lr=1.0e-05", "parallel.dp=2"])):
        assert evenload.verify(given, 2, nproc=3) == (True, ("--steps", "2"), plain)


def test_prompts_of_a_proof_reach_the_ranks(recipe, monkeypatch):
    prompts = recipe.with_name("prompts.jsonl")
    prompts.write_text('{"prompt": "def f("}\n')
    monkeypatch.setattr(api, "on_ranks", lambda *given, **arguments: (given[2][4:], arguments))
    words, arguments = evenload.verify(evenload.load_recipe(recipe), generation=True, prompts=prompts)
    assert words == ("--generate", "--prompts", str(prompts))
    assert (arguments["generation"], arguments["prompts"]) == (True, prompts)


def test_a_wrong_request_is_refused_before_ranks_start(recipe, monkeypatch):
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


def test_a_rank_works_here_and_rank_0_alone_tells(monkeypatch, recipe):
    def train(recipe, against, progress):
        progress("evenload", 1, 2, "")
        return {"against": against}

    monkeypatch.setattr(launch, "resolve_name", {"evenload.training.verbs.train:train": train}.__getitem__)
    said = []
    for rank in ("0", "1"):
        variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        answer = evenload.train(recipe, "stock", progress=lambda *words: said.append(words))
        assert answer == {"against": ("stock",)}
    assert said == [("evenload", 1, 2, "")]


def numbers(value, name=""):
    """What of a result is the same in every run."""
    if isinstance(value, dict):
        return {key: numbers(below, key) for key, below in value.items() if not key.endswith(RATES)}
    return value


@pytest.mark.slow
@pytest.mark.parametrize("forked", [("verify",), only_full(())])
def test_answers_are_those_of_the_verbs(forked, recipe, ran, launched_by_forge, monkeypatch):
    """Of two that are asked at once, one in a thread; without ``forked`` the launcher starts the ranks of both."""
    started = launch.launch
    by_verb = dict.fromkeys(forked, launched_by_forge)
    monkeypatch.setattr(launch, "launch", lambda words, *rest: by_verb.get(words[0], started)(words, *rest))
    alone = evenload.load_recipe(recipe, ["parallel.dp=1"])
    said = []
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(evenload.train(alone, progress=lambda *words: said.append(words)))
    )
    thread.start()
    proven = evenload.verify(alone, 2)
    thread.join()
    (trained,) = answers
    assert proven
    assert [words[:3] for words in said] == [("evenload", done, 2) for done in range(3)]
    of_verb = ran(recipe.parent, "train", "recipe.yaml", "parallel.dp=1")
    assert trained.keys() == of_verb.keys()
    assert [(row["loss"], row["tokens"]) for row in trained["steps"]] == [
        (row["loss"], row["tokens"]) for row in of_verb["steps"]
    ]
    assert proven["exact"]
    assert numbers(proven) == numbers(ran(recipe.parent, "verify", "recipe.yaml", "parallel.dp=1", "--steps", "2"))


@pytest.mark.slow
def test_what_ends_the_ranks_is_an_error_here(recipe, tmp_path, launched_by_forge, monkeypatch, capfd):
    monkeypatch.setattr(launch, "launch", launched_by_forge)
    with pytest.raises(evenload.EvenloadError, match="train failed on its ranks"):
        evenload.train(evenload.load_recipe(recipe, [f"log.jsonl={tmp_path}"]))
    assert "log.jsonl cannot be written" in capfd.readouterr().err
