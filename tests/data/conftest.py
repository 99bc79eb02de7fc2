import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache of its own for every test; it does not exist before something is kept."""
    folder = tmp_path_factory.mktemp("cache") / "evenload"
    monkeypatch.setenv("EVENLOAD_CACHE", str(folder))
    return folder
