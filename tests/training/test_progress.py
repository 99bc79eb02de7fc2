"""Progress comes to the launcher, and a rank never waits for it."""

from evenload.training.progress import PROGRESS_SOCKET, inherited_progress, pass_on_progress, progress_sockets


def test_what_a_rank_tells_comes_in_order_and_what_nobody_reads_is_lost(monkeypatch):
    assert inherited_progress() is None
    own_end, other_end = progress_sockets()
    monkeypatch.setenv(PROGRESS_SOCKET, str(other_end.detach()))
    tell, came = inherited_progress(), []
    assert inherited_progress() is None, "the descriptor is taken once"
    tell("train", 1, 3, "loss 2.5")
    tell("export", 2, None, "\udcff[/]")
    pass_on_progress(own_end, lambda *words: came.append(words))
    assert came == [("train", 1, 3, "loss 2.5"), ("export", 2, None, "\udcff[/]")]
    for done in range(10_000):
        tell("train", done, None, "x" * 100)
    pass_on_progress(own_end, lambda *words: came.append(words))
    assert 100 < len(came) < 10_000
    own_end.close()
    tell("train", 3, 3, "")
