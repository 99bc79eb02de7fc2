"""Chat templates as they train: each answer keeps its thoughts.

The templates of Qwen3, 3.5 and 3.6 leave the thoughts of earlier answers out, and those of DeepSeek every thought that
stands in the content, so none would be learned. Here each answer has its own, as in TRL's training forms of Qwen's
templates and of DeepSeek-R1's distillates; a test compares tokens and labels.
"""

from __future__ import annotations

_ARGUMENTS = "tool['function']['arguments']"
_TRAINED = (
    ("loop.index0 > ns.last_query_index", "true"),
    ("loop.last or (not loop.last and reasoning_content)", "true"),
    ("{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}", ""),
    ("{%- if message['content'] is none %}", "{%- if not message['content'] %}"),
    (f"+ {_ARGUMENTS} +", f"+ ({_ARGUMENTS} if {_ARGUMENTS} is string else {_ARGUMENTS} | tojson) +"),
)
"""What a template says, and what it says in training."""


def training_form(template: str) -> str:
    """A chat template that leaves no thoughts out, if it is one of those known here; else the template as it is."""
    for served, trained in _TRAINED:
        template = template.replace(served, trained)
    return template
