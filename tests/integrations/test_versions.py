"""Which version a process imports: the loaded module's, whatever pip lists, and a checkout's without a distribution."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.recipe.traits import TRAINERS
from evenload.integrations.host.versions import (
    SUPPORTED,
    describe_version,
    is_installed,
    listed_version,
    supported,
    version_of,
    what_to_install,
)
from evenload.patches.ledger import Ledger
from evenload.patches.row import Patch
from packaging.requirements import Requirement


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A function that writes files into a new folder, first on the path; what was imported is forgotten at the end."""

    def put(folder: str, files: dict[str, str]):
        root = tmp_path / folder
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        monkeypatch.syspath_prepend(str(root))
        return root

    yield put
    for name in [name for name in sys.modules if name.split(".")[0] == "hostfamily"]:
        del sys.modules[name]


INSTALLED = {
    "hostfamily_host-1.2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: hostfamily-host\nVersion: 1.2.0\n",
    "hostfamily/host/__init__.py": "__version__ = '1.2.0'\ndef step(): return 'stock'\n",
}
CHECKOUT = {
    "hostfamily/host/__init__.py": "from .package_info import __version__\ndef step(): return 'stock'\n",
    "hostfamily/host/package_info.py": "__version__ = '2.5.0'\n",
}
NAME = "hostfamily-host"


def row(supports: str) -> Patch:
    target = "hostfamily.host:step"
    return Patch(name="r", target=target, supports=supports, why="a test", replace=lambda _: lambda: "planned")


def test_an_installed_package_is_known_without_an_import(place):
    assert not is_installed(NAME)
    assert describe_version(NAME) == f"{NAME} is not installed"
    place("site", INSTALLED)
    assert (is_installed(NAME), version_of(NAME), describe_version(NAME)) == (True, "1.2.0", f"{NAME} 1.2.0")
    assert "hostfamily" not in sys.modules


def test_a_checkout_in_front_of_the_distribution_is_asked_when_it_is_loaded(place):
    place("site", INSTALLED)
    checkout = place("checkout", CHECKOUT) / "hostfamily" / "host"
    assert (listed_version(NAME), version_of(NAME)) == ("1.2.0", None)
    assert describe_version(NAME) == f"{NAME} of unknown version in {checkout}; pip lists 1.2.0"
    import_module("hostfamily.host")
    assert version_of(NAME) == "2.5.0"
    assert describe_version(NAME) == f"{NAME} 2.5.0 in {checkout}; pip lists 1.2.0"


@pytest.mark.parametrize("lazy", [True, False])
def test_rows_made_for_the_distribution_do_not_go_on_a_checkout(place, lazy):
    place("site", INSTALLED)
    checkout = place("checkout", CHECKOUT)

    def switch_on_and_import() -> None:
        ledger.apply([row(f"{NAME} >=1,<2")], lazy=lazy)
        import_module("hostfamily.host")

    with Ledger() as ledger, pytest.raises(EvenloadError) as refused:
        switch_on_and_import()
    assert refused.value.found == f"{NAME} 2.5.0 in {checkout / 'hostfamily' / 'host'}; pip lists 1.2.0"
    assert refused.value.do == "take that folder off PYTHONPATH, so that 1.2.0 is imported"
    assert not ledger.table()


@pytest.mark.parametrize("distribution", [True, False])
def test_rows_go_on_a_checkout_of_a_supported_version_whatever_pip_lists(place, distribution):
    if distribution:
        place("site", INSTALLED)
    place("checkout", CHECKOUT)
    assert is_installed(NAME)
    with Ledger() as ledger:
        ledger.apply([row(f"{NAME} >=2,<3")], lazy=True)
        host = import_module("hostfamily.host")
        assert host.step() == "planned"
    assert host.step() == "stock"


def test_a_package_in_the_midst_of_its_import_is_known_by_its_files(place):
    place("site", INSTALLED | {"hostfamily/host/__init__.py": "import evenload_asks_here\n" + "__version__ = '9'\n"})
    asks = f"from evenload.integrations.host.versions import version_of\nSEEN = version_of({NAME!r})\n"
    place("asks", {"evenload_asks_here.py": asks})
    import_module("hostfamily.host")
    assert sys.modules.pop("evenload_asks_here").SEEN == "1.2.0"
    assert version_of(NAME) == "9"


def test_extras_and_the_sets_that_are_tested_agree_with_what_is_supported():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = [Requirement(line) for extra in project["project"]["optional-dependencies"].values() for line in extra]
    named = {one.name: one.specifier for one in extras if one.name in SUPPORTED}
    assert named == {name: supported(name) for name in SUPPORTED}
    for trainer, row in TRAINERS.items():
        extra = {Requirement(line).name for line in project["project"]["optional-dependencies"][trainer]}
        assert extra == {"torch", *row.packages, *row.beside}
    groups = project["dependency-groups"]
    pinned = [Requirement(line) for group in ("tested", "newest", "older") for line in groups[group]]
    assert [one for one in pinned if one.name in SUPPORTED and str(one.specifier)[2:] not in supported(one.name)] == []
    assert {one.name for one in pinned} >= set(SUPPORTED)


@pytest.mark.parametrize(
    ("version", "says"),
    [("0.15.3", "pip install 'megatron-core"), ("0.20.0", "install a version of evenload that supports 0.20.0")],
)
def test_who_has_a_newer_version_is_not_sent_back(version, says):
    assert what_to_install("megatron-core", version, supported("megatron-core")).startswith(says)


@pytest.mark.parametrize("checkout", [False, True], ids=["installed", "a checkout in front"])
def test_a_row_that_other_versions_need_is_left_out(place, checkout):
    place("site", INSTALLED)
    if checkout:
        place("checkout", CHECKOUT)
    rows = [replace(row(f"{NAME} >=1,<3"), name=only, only=only) for only in (">=1,<2", ">=2")]
    with Ledger() as ledger:
        ledger.apply(rows)
        assert import_module("hostfamily.host").step() == "planned"
        assert [(status.row.only, status.state) for status in ledger.table()] == [
            (">=2" if checkout else ">=1,<2", "applied"),
            (">=1,<2" if checkout else ">=2", "skipped"),
        ]
    assert import_module("hostfamily.host").step() == "stock"
