"""Audit: are a script's own batches right? Its first step, each of its samples next to itself alone."""

from ...core import verbs

verbs.register(
    verbs.Verb(
        "audit", "evenload.plugins.audit.verb:audit", order=150, runs_command=True, rows="evenload.plugins.audit.rows"
    )
)
