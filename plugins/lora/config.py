"""The lora section of a recipe."""

from __future__ import annotations

from ...core.recipe.sections import FilePath
from ...core.registry import PluginConfig


class LoraConfig(PluginConfig):
    """Many tenants, each with an adapter of its own, on one base that stays as it is."""

    tenants: FilePath | None = None
    """A folder with one YAML file a tenant; a file that appears joins, one that is removed leaves."""
    out: FilePath | None = None
    """Where each tenant gets a folder of its name: adapter, metrics, status; null: ``out`` next to ``tenants``."""
    root: FilePath | None = None
    """Data, tokenizers and adapters that tenants' files name must lie below this folder, links resolved; null: they may
    lie wherever the job may read."""
    wait: bool = False
    """When all tenants are done, wait for later ones instead of ending the job."""

    def idle(self) -> str:
        """A warning where a folder of tenants is set and the plugin is disabled."""
        text = "plugins.lora.tenants has no effect: plugins.lora.enabled is false, so the model itself is trained"
        return text if self.tenants is not None else ""
