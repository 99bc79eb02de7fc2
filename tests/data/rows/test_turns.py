"""Targets of chats whose template marks none: counted by hand, and against the forms that TRL trains templates in."""

import logging
from functools import cache
from pathlib import Path

import pytest
from evenload.core.errors import EvenloadError
from evenload.data.rows.chats import ChatEncoder
from evenload.data.rows.kinds import Placed
from evenload.data.samples.cut import IGNORE
from evenload.data.tokenizers import FolderTokenizer


def user(content):
    return {"role": "user", "content": content}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def encode(folder, messages, **fields):
    encoder = ChatEncoder(FolderTokenizer(folder), "messages", all_tokens=False)
    ((one,),) = encoder.encode([Placed("line 1", {"messages": messages, **fields})])
    return one.tokens.tolist(), one.labels.tolist()


def pieces(folder, tokens, kept):
    """The text of each run of tokens for which ``kept`` holds, and of the runs between, marked by whether it does."""
    runs = []
    for token, each in zip(tokens, kept, strict=True):
        if not runs or runs[-1][0] != each:
            runs.append((each, []))
        runs[-1][1].append(token)
    decode = FolderTokenizer(folder).hub.backend_tokenizer.decode
    return [(each, decode(run, skip_special_tokens=False)) for each, run in runs]


def in_brackets(folder, tokens, labels):
    runs = pieces(folder, tokens, [label != IGNORE for label in labels])
    return "".join(f"[{text}]" if target else text for target, text in runs)


ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALLS = "{% for call in m.tool_calls %}<call>{{ call.function.name }}</call>{% endfor %}"
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + ASK
OPEN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + CALLS + "{% endfor %}" + ASK + "{# <|user|><|tool|> #}"
)
PREFILLED = PLAIN.replace("<|assistant|>", "<|assistant|><think>")
FORGETFUL = """{% set ns = namespace(last=0) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}
<|{{ m.role }}|>
    {%- if m.thinking and loop.index0 > ns.last %}<think>{{ m.thinking }}</think>{% endif %}
{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
LAST = """{% for m in messages -%}
<|{{ m.role }}|>{{ m.content }}{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}
{%- endfor %}
{{- eos_token if not add_generation_prompt else '<|assistant|>' }}"""
INSIDE = """{% set rest = messages[1:] if messages[0].role == 'system' else messages %}
{% for m in rest -%}{% if m.role == 'tool' %}{% continue %}{% endif -%}
<|{{ m.role }}|>{% for call in m.tool_calls %}<call>{{ call.function.name }}</call>{% endfor %}
{%- set ns = namespace(tools=m.tool_calls) %}
{%- for i in range(loop.index0 + 1, rest | length) if ns.tools and rest[i].role == 'tool' -%}
<result>{{ rest[i].content }}</result>{% endfor -%}{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
AROUND = (
    """{% for m in messages %}{% if m.role == 'tool' %}
<|tool|>{% for each in messages %}{% if each.tool_calls %}{{ each.tool_calls[0].function.name }}={% endif %}{% endfor %}
{{- m.content }}<|end|>{% else -%}
<|{{ m.role }}|>{{ m.content }}"""
    + CALLS
    + "<|end|>{% endif %}{% endfor %}"
    + ASK
)
BY_NUMBER = PLAIN.replace("for m in messages %}", "for i in range(messages | length) %}{% set m = messages[i] %}")

ASKED = [user("1+2?"), said("", tool_calls=[call("add", {"a": 1, "b": 2})]), {"role": "tool", "content": "3"}]
THOUGHT = [user("q"), said("Yes", thinking="mm"), user("r"), said("No", thinking="hm")]
BY_HAND = {
    "one turn": (PLAIN, THOUGHT[:2], "<|user|>q<|end|><|assistant|>[Yes<|end|>]", 4),
    "turns": (
        PLAIN,
        [{"role": "system", "content": "s"}, *THOUGHT],
        "<|system|>s<|end|><|user|>q<|end|><|assistant|>[Yes<|end|>]<|user|>r<|end|><|assistant|>[No<|end|>]",
        7,
    ),
    "the end mark is the next turn's": (
        OPEN,
        [user("q"), said("Yes"), *ASKED, said("3")],
        "<|user|>q<|assistant|>[Yes<|user|>]1+2?<|assistant|>[<call>add</call><|tool|>]3<|assistant|>[3<|user|>]",
        4 + 6 + 2,
    ),
    "a prompt that opens thoughts nobody had": (
        PREFILLED,
        [user("q"), said("<3")],
        "<|user|>q<|end|><|assistant|>[<3<|end|>]",
        3,
    ),
    "a prompt that opens thoughts": (
        PREFILLED,
        [user("q"), said("<think>mm</think>Yes")],
        "<|user|>q<|end|><|assistant|><think>[mm</think>Yes<|end|>]",
        7,
    ),
    "thoughts that the next turn loses": (
        FORGETFUL,
        THOUGHT,
        "<|user|>q<|end|><|assistant|>[Yes<|end|>]<|user|>r<|end|><|assistant|>[<think>hm</think>No<|end|>]",
        4 + 7,
    ),
    "the last end mark is another": (
        LAST,
        THOUGHT,
        "<|user|>q<|end|><|assistant|>[Yes<|end|>]<|user|>r<|end|><|assistant|>[No<|return|></s>]",
        4 + 4,
    ),
    "results inside the answer": (
        INSIDE,
        [{"role": "system", "content": "s"}, ASKED[0], {**ASKED[1], "content": "so"}, ASKED[2], user("r"), said("No")],
        "<|user|>1+2?<|end|><|assistant|>[<call>add</call>]<result>3</result>[so<|end|>]<|user|>r<|end|><|assistant|>"
        "[No<|end|>]",
        5 + 3 + 3,
    ),
    "a loop around the messages in one of them": (
        AROUND,
        [*ASKED, said("3")],
        "<|user|>1+2?<|end|><|assistant|>[<call>add</call><|end|>]<|tool|>add=3<|end|><|assistant|>[3<|end|>]",
        6 + 2,
    ),
    "a loop that shows the fields of messages, marks among them": (
        PLAIN.replace("m.content", "m | tojson"),
        THOUGHT[:1] + [said("Yes")],
        '<|user|>{"role": "user", "content": "q"}<|end|><|assistant|>[{"role": "assistant", "content": "Yes"}<|end|>]',
        39 + 1,
    ),
    "no loop over messages": (
        BY_NUMBER,
        THOUGHT,
        "<|user|>q<|end|><|assistant|>[Yes<|end|>]<|user|>r<|end|><|assistant|>[No<|end|>]",
        7,
    ),
    "a loop over messages that renders none": (
        "{% for m in messages %}{% set last = m %}{% endfor %}" + BY_NUMBER,
        THOUGHT,
        "<|user|>q<|end|><|assistant|>[Yes<|end|>]<|user|>r<|end|><|assistant|>[No<|end|>]",
        7,
    ),
}


@pytest.mark.parametrize(("template", "messages", "text", "num_targets"), BY_HAND.values(), ids=BY_HAND)
def test_targets_are_those_counted_by_hand(bytes_folder, template, messages, text, num_targets):
    folder = bytes_folder(template, text)
    tokens, labels = encode(folder, messages)
    assert in_brackets(folder, tokens, labels) == text
    assert sum(label != IGNORE for label in labels) == num_targets


def test_a_loop_that_renders_nothing_tells_no_turns(bytes_folder):
    """Where beginnings are unlike the whole, too, nothing of the question becomes a target."""
    folder = bytes_folder("{{ messages | length }}{% for m in messages %}{% set last = m %}{% endfor %}" + BY_NUMBER)
    for chat in (THOUGHT[:2], THOUGHT):
        with pytest.raises(EvenloadError, match=r"beginning of line 1 .*\n.*message 1, 'Yes'"):
            encode(folder, chat)


def test_what_a_template_drops_of_an_answer_is_said_once(bytes_folder, caplog):
    encoder = ChatEncoder(FolderTokenizer(bytes_folder(FORGETFUL)), "messages", all_tokens=False)
    with caplog.at_level(logging.WARNING):
        encoder.encode([Placed("line 1", {"messages": THOUGHT[2:]})])
        assert not caplog.messages
        encoder.encode([Placed(f"line {number}", {"messages": THOUGHT}) for number in (2, 3)])
    (message,) = caplog.messages
    assert "an answer of line 2" in message
    assert "'mm'" in message
    caplog.clear()
    for chat in (ASKED, [user("q"), said([{"type": "text", "text": "Yes"}]), user("r"), said("No", tool_calls=5)]):
        encode(bytes_folder(PLAIN), chat)
    (message,) = caplog.messages
    assert "'add'" in message


TOOL = {
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CHATS = {
    "one turn": [user("q"), said("Yes")],
    "turns": [user("q"), said("Yes"), user("more?"), said("No, none."), user("so?"), said("Fine")],
    "system": [{"role": "system", "content": "be brief"}, user("q"), said("Yes"), user("r"), said("No")],
    "tools": [*ASKED[:2], {**ASKED[2], "name": "add"}, said("It is 3."), user("thanks"), said("Welcome")],
    "thoughts": [
        user("q"),
        said("Yes", reasoning_content="it holds", thinking="it holds"),
        user("r"),
        said("No", reasoning_content="it fails", thinking="it fails"),
    ],
}
BAR = "\uff5c"  # of DeepSeek's marks
DEEPSEEK = {f"<{BAR}Assistant{BAR}>", f"<{BAR}tool\u2581outputs\u2581end{BAR}>"}
THINK = {"<think>", "<think>\n"}
THEIRS = {
    "deepseek_r1_distill": DEEPSEEK,
    "deepseekv3": DEEPSEEK,
    "gptoss": {"<|start|>assistant"},
    "muse_glimmer": {"<|start|>assistant"},
    "nemotron_3_5_lightning": THINK,
    "nemotron_3_nano": THINK,
    "nemotron_3_super": THINK,
    "nemotron_3_ultra": THINK,
    "qwen2_5": {"\n"},
    "qwen3_5_nothink": {"<think>\n\n</think>\n\n", "<think>\n"},
    "qwen3_5_think": THINK,
    "qwen3_6": THINK,
    "qwen3_8": THINK,
}
"""What TRL's form alone makes targets: what the template itself writes where the assistant is to speak."""
OURS = {"diffusion_gemma": {"<|tool_response>", "<|turn>model\n"}}
"""What is a target here alone: where a turn stops for its tools, and what follows their results unasked for."""
ALTERNATE = "roles must alternate"
REFUSED = {
    ("cohere", "tools"): ALTERNATE,
    ("cohere2", "tools"): ALTERNATE,
    ("gemma", "system"): "System role not supported",
    ("gemma", "tools"): ALTERNATE,
    ("gemma3", "tools"): ALTERNATE,
    ("idefics3", "tools"): "has no element 0",
    ("smolvlm", "tools"): "has no element 0",
    **{("llava_next", chat): "str object" for chat in CHATS},
}
"""Chats that TRL's form does not take, either."""
QUICK = (
    "glm4moe",
    "gptoss",
    "phi3",
    "deepseekv3",
    "nemotron_3_nano",
    "qwen3",
    "qwen3_5_think",
    "diffusion_gemma",
    "gemma",
)


@cache
def trl_templates():
    trl = pytest.importorskip("trl", reason="the chat templates of TRL are the reference")
    return {path.stem: path.read_text() for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}


def check_against_trl(name, bytes_folder):
    """Five chats by a template as its model has it, against those by TRL's training form of it, to the token."""
    transformers, templates = pytest.importorskip("transformers"), trl_templates()
    trained = templates.get(f"{name}_training", templates[name])
    folder = bytes_folder(templates[name], trained)
    hub = transformers.AutoTokenizer.from_pretrained(folder)
    for chat, messages in CHATS.items():
        fields = {"tools": [{"type": "function", "function": TOOL}]} if chat == "tools" else {}
        if reason := REFUSED.get((name, chat)):
            with pytest.raises(EvenloadError, match=reason):
                encode(folder, messages, **fields)
            with pytest.raises(Exception, match=reason):
                hub.apply_chat_template(messages, chat_template=trained, **fields)
            continue
        tokens, labels = encode(folder, messages, **fields)
        assert {IGNORE} < set(labels)
        if "endgeneration" not in trained:  # TRL has no training form of it
            assert tokens == hub.apply_chat_template(messages, return_dict=False, **fields)
            continue
        settings = {"chat_template": trained, "return_dict": True, "return_assistant_tokens_mask": True, **fields}
        theirs = hub.apply_chat_template(messages, **settings)
        assert tokens == theirs["input_ids"]
        ours = [label != IGNORE for label in labels]
        differ = [(mine, bool(other)) for mine, other in zip(ours, theirs["assistant_masks"], strict=True)]
        runs = pieces(folder, tokens, differ)
        assert {text for kind, text in runs if kind == (False, True)} <= THEIRS.get(name, set()), chat
        assert {text for kind, text in runs if kind == (True, False)} <= OURS.get(name, set()), chat


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_templates_have_the_targets_of_trl(bytes_folder, name):
    check_against_trl(name, bytes_folder)


@pytest.mark.full
def test_all_templates_have_the_targets_of_trl(bytes_folder):
    names = {name for name in trl_templates() if not name.endswith("_training")}
    assert names >= {*QUICK, *THEIRS, *OURS}
    for name in sorted(names):
        check_against_trl(name, bytes_folder)


def test_what_deepseek_drops_of_answers_is_kept(bytes_folder):
    """Thoughts in the content, and calls beside no content, whose arguments are objects."""
    name = "deepseekv3"
    folder = bytes_folder(trl_templates()[name], "<think></think>")
    thought = [user("q"), said("<think>it holds</think>Yes")]
    assert in_brackets(folder, *encode(folder, thought)).endswith(
        f"<think>[it holds</think>Yes<{BAR}end\u2581of\u2581sentence{BAR}>]"
    )
    texts = set()
    for content in ("", None):
        for arguments in ({"a": 1}, '{"a": 1}'):
            chat = [user("q"), said(content, tool_calls=[call("add", arguments)])]
            texts.add(in_brackets(folder, *encode(folder, chat)))
    (text,) = texts
    assert 'add\n```json\n{"a": 1}\n```' in text.partition("[")[2]


def test_a_template_that_takes_content_in_parts_takes_it_so(bytes_folder):
    """What the message of its refusal says to do."""
    folder = bytes_folder(trl_templates()["llava_next"])
    with pytest.raises(EvenloadError, match="fails on line 1") as caught:
        encode(folder, CHATS["one turn"])
    assert '[{"type": "text", "text": ...}]' in caught.value.do
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in CHATS["one turn"]]
    assert in_brackets(folder, *encode(folder, parts)) == "[INST] q [/INST][ Yes</s> ]"
