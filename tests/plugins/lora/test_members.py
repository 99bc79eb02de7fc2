"""What becomes of a tenant whose adapter cannot be written, and of a file that nobody can make sense of."""

from types import SimpleNamespace

from evenload.core.errors import EvenloadError
from evenload.plugins.lora.arrivals.folder import Came, Folder, News
from evenload.plugins.lora.members import TenantTable
from evenload.plugins.lora.records.output import LAST
from evenload.runtime.watchdog import Watchdog


class Output:
    """Adapters of the names in ``broken`` cannot be written."""

    def __init__(self):
        self.broken = set()
        self.said = []

    def adapter(self, tenant, name):
        if name in self.broken:
            raise EvenloadError("the disk is full", tenant.name)

    def status(self, tenant):
        self.said.append(tenant.state)

    def gone(self, row):
        return row

    def refused(self, name, error):
        self.said.append(f"{name}: {error.what}")


class Tenant:
    number, name, file, step, steps, state, reason = 1, "acme", "acme", 2, 9, "", ""

    def becomes(self, state, reason):
        self.state, self.reason = state, reason


def members(output, folder):
    left = []
    adapters = SimpleNamespace(numbers=(1,), leave=left.append, left=left)
    host, samples = SimpleNamespace(adapters=adapters), SimpleNamespace(sources={1: None})
    job = SimpleNamespace(host=host, samples=samples, watchdog=Watchdog(gone_s=9.0, stuck_s=9.0))
    return TenantTable(job, output, folder, None)


def test_one_whose_adapter_cannot_be_written_fails_and_it_stands_beside_its_file(tmp_path):
    for broken in ({LAST}, {LAST, "best"}, {"best"}):
        output, tenant = Output(), Tenant()
        one = members(output, Folder(tmp_path))
        assert one.keep(tenant, "best")
        assert one.keep(tenant, LAST)
        assert not tenant.state
        output.broken = broken
        assert not one.keep(tenant, "best" if "best" in broken else LAST)
        assert tenant.state == "failed"
        assert "the disk is full" in tenant.reason
        assert one._job.host.adapters.left == [1]
        assert "the disk is full" in (tmp_path / "acme.error").read_text()


def test_whatever_a_file_raises_is_its_own_error(tmp_path, monkeypatch):
    def fails(text, name):
        raise RecursionError(f"too deep in {name}")

    monkeypatch.setattr("evenload.plugins.lora.members.parse_tenant", fails)
    output = Output()
    one = members(output, Folder(tmp_path))
    one.apply(News(came=(Came("acme", "x"), Came("bolt", "", EvenloadError("it cannot be read")))))
    assert sorted(one.invalid_files) == ["acme", "bolt"]
    assert "RecursionError: too deep in acme" in (tmp_path / "acme.error").read_text()
    assert output.said == ["acme: the tenant cannot be opened", "bolt: it cannot be read"]
