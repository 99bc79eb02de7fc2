"""Another name of harness.proof.pipelines, for those that load this file by its path."""

from evenload.core.laws import check
from harness.proof.pipelines import in_v, random_pipeline

__all__ = ["check", "in_v", "random_pipeline"]
