"""Lines of progress where there is no terminal."""

from evenload.commands.tables import progress
from evenload.commands.tables.progress import progress_shown


def test_a_task_that_begins_once_more_counts_its_time_anew(capsys, monkeypatch):
    times = iter([0.0, 20.0, 40.0, 100.0, 120.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with progress_shown() as show:
        for done in (0, 2, 4, 0, 1):
            show("profile", done, 4, f"case {done}")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["2/4,", "4/4", "1/4,"]
    assert "0:00:20 left" in lines[0]
    assert "0:01:00 left" in lines[2], "20 s for the first of four, whatever went before"
