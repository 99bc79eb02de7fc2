"""What a tenant leaves: numbers that a run which goes on does not double, and how it has ended."""

import json
import os
from types import SimpleNamespace

from evenload.core.errors import EvenloadError
from evenload.plugins.lora.records.output import Output
from evenload.plugins.lora.verb import standing


class Tenant:
    def __init__(self, step, **status):
        self.name, self.step = "acme", step
        self._status = {"name": "acme", "state": "training", "step": step, "steps": 9, **status}

    def status(self):
        return self._status


def output(out, is_rank0=True):
    return Output(SimpleNamespace(out=out, is_rank0=is_rank0))


def steps(out):
    return [json.loads(line)["step"] for line in (out / "acme" / "metrics.jsonl").read_text().splitlines()]


def test_rows_behind_the_step_that_a_run_goes_on_from_are_dropped(tmp_path):
    one, tenant = output(tmp_path), Tenant(0)
    one.begin(tenant)
    for step in range(5):
        one.row(tenant, {"step": step, "loss": 1.0})
    with (tmp_path / "acme" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # torn when the job was killed
    output(tmp_path).begin(Tenant(3))
    assert steps(tmp_path) == [0, 1, 2]
    output(tmp_path).begin(Tenant(0))
    assert steps(tmp_path) == []


def test_an_end_is_known_again_by_the_file_it_was_trained_from(tmp_path):
    one = output(tmp_path)
    assert one.past("acme", "abc") is None
    for state in ("done", "stopped", "dropped", "failed"):
        one.status(Tenant(3, state=state, file="abc"))
        past = one.past("acme", "abc")
        assert past["state"] == state
        assert one.past("acme", "of another file") is None
    for state in ("training", "waiting", "left"):
        one.status(Tenant(3, state=state, file="abc"))
        assert one.past("acme", "abc") is None
    whole = {"name": "acme", "state": "done", "step": 9, "steps": 9, "file": "abc"}
    for wrong in ({"step": "yes"}, {"steps": None}, {"name": "bolt"}, {"state": "over"}, {"loss": []}):
        (tmp_path / "acme" / "status.json").write_text(json.dumps({**whole, **wrong}))
        assert one.past("acme", "abc") is None
    for text in ("{", "[]", '"done"'):
        (tmp_path / "acme" / "status.json").write_text(text)
        assert one.past("acme", "abc") is None


TORN = [
    b"\xff\xfe\n",
    b"\x00" * 9,
    b"[" * 99_999,
    b'{"step": 1e999}',
    b'{"step": ' + b"9" * 999 + b"}",
    b"3",
    b'"evaluation"',
]


def test_rows_that_are_none_are_dropped_and_the_others_stay(tmp_path):
    (tmp_path / "acme").mkdir()
    content = b'{"step": 0}\n' + b"\n".join(TORN) + b'\n{"step": 1}\n'
    (tmp_path / "acme" / "metrics.jsonl").write_bytes(content)
    output(tmp_path).begin(Tenant(2))
    assert steps(tmp_path) == [0, 1]


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path):
    (tmp_path / "acme").mkdir()
    with open(tmp_path / "acme" / "metrics.jsonl", "wb") as file:
        file.write(b'{"step": 0}\n')
        file.truncate(1 << 40)  # of which the disk holds nothing
    output(tmp_path).begin(Tenant(2))
    assert steps(tmp_path) == [0]


def test_a_pipe_a_folder_or_a_link_where_a_file_shall_be_stops_nobody(tmp_path):
    folder, elsewhere = tmp_path / "acme", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_text("of somebody else")
    os.mkfifo(folder / "metrics.jsonl")
    for name in (".aside", "status.json"):
        os.symlink(elsewhere, folder / name)
    one, tenant = output(tmp_path), Tenant(0)
    one.begin(tenant)
    one.row(tenant, {"step": 0})
    assert json.loads((folder / "status.json").read_text())["name"] == "acme"
    assert elsewhere.read_text() == "of somebody else"
    (folder / "status.json").unlink()
    (folder / "status.json").mkdir()
    one.status(tenant)


def test_a_file_that_is_refused_stands_among_the_tenants_unless_one_of_its_name_was_trained(tmp_path):
    one, error = output(tmp_path), EvenloadError("there is no data", "x.jsonl")
    for name in ("bolt", "bolt", "acme"):
        one.refused(name, error)
    rows = {row["name"]: row for row in standing(tmp_path)["tenants"]}
    assert rows["bolt"]["state"] == "failed"
    assert "there is no data" in rows["bolt"]["reason"]
    assert one.past("bolt", "") is None or not rows["bolt"]["steps"]
    one.status(Tenant(3, state="done", file="abc"))
    one.refused("acme", error)
    assert one.past("acme", "abc") is not None


def test_numbers_that_cannot_be_written_are_given_up_with_one_warning(tmp_path, caplog):
    (tmp_path / "acme").write_text("a file where the folder should be")
    one, tenant = output(tmp_path), Tenant(0)
    one.begin(tenant)
    one.row(tenant, {"step": 0})
    one.status(tenant)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "numbers of the tenant acme are not written, training goes on"
    ]
