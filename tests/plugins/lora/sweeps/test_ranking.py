"""What a sweep comes to: a ranked table, a winner's folder, and both again from the files."""

import json
from dataclasses import asdict

import pytest
from evenload.core.errors import EvenloadError
from evenload.plugins.lora.state.status import NAME, TenantStatus, leave_word, read_status
from evenload.plugins.lora.sweeps import ranking as rank
from evenload.plugins.lora.sweeps.halving import Halving
from evenload.plugins.lora.sweeps.trials import sweep_of
from evenload.plugins.lora.tables import table as tables
from evenload.plugins.lora.tenant_file import Tenant
from evenload.plugins.lora.verb import standing

SWEEP = sweep_of(
    "acme",
    Tenant.model_validate(
        {"data": {"source": "a.jsonl"}, "train": {"steps": 20}, "sweep": {"train.lr": [1, 2, 3, 4], "halve_every": 5}}
    ),
)
NAMES = [trial.name for trial in SWEEP.trials]


def write_status(folder, status):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(json.dumps({**asdict(status), "digest": "of its file"}))


def raced(last):
    """A sweep in which the third trial wins, if it comes to an end; the fourth fails."""
    halving = Halving(NAMES, 5, 20)
    halving.fail(NAMES[3])
    for name, loss in zip(NAMES, (3.0, 2.0, 1.0), strict=False):
        halving.arrive(name, 5, loss)
    assert halving.close() is not None
    states = ["dropped", "training", last, "failed"]
    if last == "done":
        halving.end(NAMES[1], 1.5)
        halving.end(NAMES[2], 0.5)
        states[1] = "done"
    standing = {name: TenantStatus(name, state, 20, 20) for name, state in zip(NAMES, states, strict=True)}
    return rank.ranking_of(SWEEP, halving, {NAMES[0]: 3.0, NAMES[1]: 1.5, NAMES[2]: 0.5}, standing)


def test_it_ranks_and_names_a_winner_only_when_it_is_over():
    ended, going = raced("done"), raced("training")
    assert [row["trial"] for row in ended["trials"]] == [NAMES[2], NAMES[1], NAMES[0], NAMES[3]]
    assert ended["trials"][0]["values"] == {"train.lr": 3}
    assert (ended["winner"], going["winner"]) == (NAMES[2], None)
    assert ended["loss_is"] == rank.TRAINED


def test_the_winners_folder_is_copied_and_all_is_read_again(tmp_path, shown):
    out = tmp_path / "out"
    ended = raced("done")
    for row in ended["trials"]:
        write_status(out / row["trial"], TenantStatus(row["trial"], row["state"], 20, 20, loss=row["loss"], tokens=7))
    (out / NAMES[2] / "last").mkdir()
    (out / NAMES[2] / "last" / "adapter_config.json").write_text("{}")
    rank.write_ranking(out, raced("training"), None)
    written = rank.write_ranking(out, ended, out / NAMES[2] / "last")
    assert [path.name for path in (out / "acme" / "best").iterdir()] == ["adapter_config.json"]
    result = standing(tmp_path)
    assert result["sweeps"] == [json.loads(json.dumps(written))]
    assert [row["name"] for row in result["tenants"]] == NAMES
    text = shown(tables(result))
    assert "28 tokens trained" in text
    assert f"the adapter of {NAMES[2]} is in" in text


ROW = {"trial": "a", "state": "done", "step": 1, "steps": 1, "loss": 1.0}
WHOLE = {"sweep": "a", "winner": None, "best": None, "loss_is": "so", "trials": [ROW], "file": "abc"}


def test_a_ranking_without_a_race_is_whole(tmp_path):
    write_status(tmp_path / "a", TenantStatus("a", "done", 1, 1))
    (tmp_path / "a" / rank.NAME).write_text(json.dumps(WHOLE))
    assert standing(tmp_path)["sweeps"] == [WHOLE]


@pytest.mark.parametrize(
    "text",
    ['{"sweep": "a"}', "[]", '{"sweep": "a", "winner": 1, "best": 1, "loss_is": 1}', "\xff", "[" * 9999]
    + [
        json.dumps({**WHOLE, **wrong})
        for wrong in ({"winner": 3}, {"trials": {}}, {"race": "x"}, {"race": {"rung": []}})
    ]
    + [
        json.dumps({**WHOLE, "trials": [{**ROW, **wrong}]}) for wrong in ({"steps": "yes"}, {"loss": "a"}, {"state": 1})
    ],
)
def test_a_damaged_ranking_is_refused_and_no_race_goes_on_from_it(text, tmp_path):
    assert rank.race_in(tmp_path, "a", "abc") is None
    write_status(tmp_path / "a", TenantStatus("a", "done", 1, 1))
    (tmp_path / "a" / rank.NAME).write_text(text)
    with pytest.raises(EvenloadError, match="the ranking"):
        standing(tmp_path)
    assert rank.race_in(tmp_path, "a", "abc") is None


def test_a_folder_of_tenants_says_where_their_job_writes(tmp_path):
    clients, out = tmp_path / "clients", tmp_path / "elsewhere" / "adapters"
    clients.mkdir()
    write_status(out / "a", TenantStatus("a", "done", 1, 1))
    with pytest.raises(EvenloadError, match="no tenant has a status in"):
        standing(clients)
    leave_word(clients, out)
    assert standing(clients)["folder"] == str(out)
    (clients / ".out").write_bytes(b"\xff\x00")
    with pytest.raises(EvenloadError, match="no tenant has a status in"):
        standing(clients)


def test_a_status_comes_back_as_it_was(tmp_path):
    status = TenantStatus("a", "stopped", 3, 9, 2.5, 2.25, 2, 1234, 5.5, "why")
    write_status(tmp_path / "a", status)
    assert read_status(tmp_path / "a" / "status.json") == status
