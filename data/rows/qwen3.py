"""Qwen3's chat template as it trains: it renders the beginning of a chat as the whole, and marks the answers.

The one of its folders leaves the thoughts of earlier answers out, and with them the empty ones that every last answer
has. Here each answer has its own, as in TRL's training form of the template; a test compares tokens and labels.
"""

from __future__ import annotations

_ANSWER = """        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + \
'\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
"""
_TRAINED = """        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation %}
        {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
"""
_END = """        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
"""
_MARKED_END = _END.replace("    {%- elif", "        {%- endgeneration %}\n    {%- elif")


def training_form(template: str) -> str:
    """A chat template, or the training form of Qwen3's."""
    if _ANSWER not in template or _END not in template:
        return template
    return template.replace(_ANSWER, _TRAINED).replace(_END, _MARKED_END)
