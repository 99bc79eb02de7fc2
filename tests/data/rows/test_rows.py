"""Prompts, chats and labels, from JSON Lines, arrow and parquet alike, against what `transformers` and TRL make."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.input.sandbox import Budget
from evenload.data.samples.cut import IGNORE
from evenload.data.sources import open_source
from evenload.data.tokenizers import FolderTokenizer

from ..files import jsonl, table
from .conftest import PLAIN

QUESTION = {"role": "user", "content": "the name?"}
ANSWER = {"role": "assistant", "content": "one and other"}
CHAT = [{"role": "system", "content": "be brief"}, QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "returned"}]
PAIRS = [
    {"prompt": "def name(one):\n", "completion": "the name of one"},
    {"prompt": "the na", "completion": "me of the other"},  # a token may reach over the border
    {"prompt": "name", "completion": "</s>"},
    {"prompt": "", "completion": "w\u00f6rter \U0001f600"},
]


def write(folder, rows):
    return jsonl(folder / "rows.jsonl", rows)


def read(spec, tokenizer="bytes", **settings):
    source = open_source(spec, max_length=settings.pop("max_length", None), tokenizer=str(tokenizer), **settings)
    return source, [(source.tokens(i).tolist(), source.labels(i).tolist()) for i in range(len(source.lengths))]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("rows", [PAIRS, [{"messages": CHAT}, {"messages": CHAT[:3]}]], ids=["pairs", "chats"])
def test_every_format_gives_the_same(tmp_path, rows, kind, plain_folder):
    source, expected = read(write(tmp_path, rows), plain_folder)
    assert read(write(tmp_path, rows), plain_folder)[1] == expected, "of the cache"
    assert read(table(tmp_path, kind, rows), plain_folder)[1] == expected
    assert source.targets.tolist() == [sum(label != IGNORE for label in labels[1:]) for _, labels in expected]
    assert source.report()["targets"] == source.targets.sum() < source.report()["tokens"]


def test_prompts_carry_no_loss_under_bytes(tmp_path):
    source, rows = read(write(tmp_path, PAIRS[:1]))
    assert bytes(rows[0][0]).decode() == "def name(one):\nthe name of one"
    assert bytes(label for label in rows[0][1] if label != IGNORE).decode() == "the name of one"
    assert source.targets.tolist() == [15]
    assert read(write(tmp_path, PAIRS[:1]), loss_on="all")[0].targets is None


def test_pairs_are_tokenised_as_trl_does(tmp_path, marked_folder):
    """Text and messages; TRL's own preparation, without its trainer."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(marked_folder)
    chats = [{"prompt": CHAT[:2], "completion": [ANSWER]}, {"prompt": CHAT[:4], "completion": CHAT[4:]}]
    for rows in (PAIRS, chats):
        trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
        settings = SimpleNamespace(
            dataset_num_proc=None,
            dataset_text_field="text",
            assistant_only_loss=False,
            max_length=None,
            shuffle_dataset=False,
        )
        data = datasets.Dataset.from_list(rows)
        theirs = trl.SFTTrainer._prepare_dataset(trainer, data, tokenizer, settings, False, None, "train")
        ours = read(write(tmp_path, rows), marked_folder, min_length=1)[1]
        assert ours == list(zip(theirs["input_ids"], theirs["labels"], strict=True))


def test_chats_have_the_targets_that_transformers_marks(tmp_path, plain_folder, marked_folder):
    """A template without marks gives the same targets, from where answers begin and end."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(marked_folder)
    rendered = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    labels = np.where(rendered["assistant_masks"], rendered["input_ids"], IGNORE).tolist()
    assert {IGNORE} < set(labels)
    for folder in (plain_folder, marked_folder):
        assert read(write(tmp_path, [{"messages": CHAT}]), folder)[1] == [(rendered["input_ids"], labels)]
    source, rows = read(write(tmp_path, [{"messages": CHAT}]), plain_folder, loss_on="all")
    assert source.targets is None
    assert rows == [(rendered["input_ids"], rendered["input_ids"])]


def test_a_row_of_several_chats_is_as_many_documents(tmp_path, plain_folder):
    """Megatron's SFT form: each chat begins with a system message."""
    _, alone = read(write(tmp_path, [{"messages": CHAT}, {"messages": CHAT[:3]}]), plain_folder)
    source, together = read(write(tmp_path, [{"messages": [*CHAT, *CHAT[:3]]}]), plain_folder)
    assert together == alone
    assert source.report()["documents"] == 2


def test_a_chat_without_answer_has_no_target_and_one_ends_behind_its_last(tmp_path, plain_folder):
    source, rows = read(
        write(tmp_path, [{"messages": CHAT[:2]}, {"messages": CHAT[:4]}, {"messages": CHAT[:3]}]), plain_folder
    )
    assert source.targets[0] == 0 < source.targets[1]
    assert rows[1] == rows[2]
    assert source.report()["without_target"] == 1


def test_tools_are_handed_to_the_template(tmp_path, folder_with):
    folder = folder_with("{{ tools | length }} {{ more }}" + PLAIN)
    row = {"messages": CHAT[:3], "tools": '[{"type": "function"}]', "chat_template_kwargs": {"more": "other"}}
    _, plain = read(write(tmp_path, [{"messages": CHAT[:3]}]), folder_with("1 other" + PLAIN))
    assert read(write(tmp_path, [row]), folder)[1] == plain


def test_labels_may_be_other_tokens_and_are_cut_with_them(tmp_path):
    rows = [{"input_ids": [1, 2, 3, 4, 5, 6], "labels": [1, -100, 9, 4, -100, 6]}, {"input_ids": None, "labels": None}]
    for spec in (write(tmp_path, rows), table(tmp_path, "parquet", rows)):
        source, content = read(spec, max_length=4, long_samples="split")
        assert content == [([1, 2, 3, 4], [1, -100, 9, 4]), ([5, 6], [-100, 6])]
        assert source.targets.tolist() == [2, 1]
        assert source.vocab_size == 10
        assert read(spec, max_length=3, long_samples="truncate")[1] == [([1, 2, 3], [1, -100, 9])]


def test_labels_that_are_the_tokens_cost_nothing(tmp_path):
    source, _ = read(write(tmp_path, [{"input_ids": [1, 2], "labels": [-100, 2]}]))
    assert source.targets is None


def test_the_end_of_sequence_is_put_where_it_is_asked_for(tmp_path, plain_folder, bare_folder):
    text = write(tmp_path, [{"text": "the name"}, {"text": "one</s>"}])
    plain, ending = (read(text, plain_folder, append_eos=wanted)[1] for wanted in (None, True))
    assert plain == read(text, bare_folder / "tokenizer.json")[1]
    assert [tokens for tokens, _ in ending] == [[*plain[0][0], 1], plain[1][0]]
    pairs = write(tmp_path, PAIRS[:1])
    with_end, without = (read(pairs, plain_folder, append_eos=wanted)[1][0] for wanted in (None, False))
    assert with_end == ([*without[0], 1], [*without[1], 1])
    for rows in (PAIRS, [{"text": "the name"}]):
        with pytest.raises(EvenloadError, match="without eos_token"):
            read(write(tmp_path, rows), append_eos=True)


def test_another_template_or_another_rule_is_another_entry_of_the_cache(tmp_path, plain_folder, folder_with):
    spec = write(tmp_path, [{"messages": CHAT}])
    lengths = {read(spec, folder)[0].fingerprint for folder in (plain_folder, folder_with("x" + PLAIN))}
    assert len(lengths | {read(spec, plain_folder, loss_on="all")[0].fingerprint}) == 3


BAD = {
    "a template that fails": ([{"messages": CHAT}, {"messages": [QUESTION] * 2}], r"fails on line 2 .*\n.*alternate"),
    "an unknown role": ([{"messages": [{**QUESTION, "role": "usr"}]}], "line 1 .* unknown role.*\n.*\n.*'user'"),
    "no message": ([{"messages": [QUESTION, ANSWER]}, {"messages": []}], "line 2 .* no messages"),
    "no role": ([{"messages": [{"content": "a"}]}], "line 1 .* without role"),
    "no content": ([{"messages": [{"role": "user"}]}], "line 1 .* without content"),
    "no completion": ([PAIRS[0], {"prompt": "a"}], "line 2 .* without completion"),
    "null for completion": ([PAIRS[0], {"prompt": "a", "completion": None}], "line 2 .* without completion"),
    "text and messages": ([{"prompt": "a", "completion": [ANSWER]}], "completion of line 1 .* not alike"),
    "tools that are no JSON": ([{"messages": CHAT, "tools": "{"}], "tools of line 1 .* not JSON"),
    "settings that are none": ([{"messages": CHAT, "chat_template_kwargs": [1]}], "kwargs of line 1 .* no mapping"),
    "too few labels": ([{"input_ids": [1, 2], "labels": [1]}], "labels of line 1 .*\n.*1 labels, 2 tokens"),
    "a label that is none": ([{"input_ids": [1, 2], "labels": [1, -1]}], "'labels' in line 1 .* impossible"),
    "no label at all": ([{"input_ids": [1, 2], "labels": [-100, -100]}], "no target to train on"),
}
SAME = "messages | length > 1 and messages[0].role == messages[1].role"
STRICT = f"{{% if {SAME} %}}{{{{ raise_exception('alternate') }}}}{{% endif %}}"


@pytest.mark.parametrize(("rows", "words"), BAD.values(), ids=BAD)
def test_a_bad_row_is_refused_with_its_line(tmp_path, folder_with, rows, words):
    with pytest.raises(EvenloadError, match=words) as caught:
        read(write(tmp_path, rows), folder_with(STRICT + PLAIN))
    assert caught.value.do


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": (ENDLESS, "takes too long"),
    "a number without end": ("{{ 10 ** (10 ** (4 + messages | length)) % 7 }}", "takes too long"),
    "text beyond memory": ("{{ 'a' * 10 ** (5 + messages | length) }}", "MemoryError"),
    "text beyond any sample": ("{{ 'a' * 10 ** (3 + messages | length) }}", "it gives more than 67108864 bytes"),
    "its own process": ("{{ cycler.__init__.__globals__.os._exit(0) }}", "SecurityError"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("template", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_template_without_end_is_refused_with_its_folder_and_row(tmp_path, folder_with, template, words, monkeypatch):
    left_s = 1.0 if words == "takes too long" else 60.0
    monkeypatch.setattr("evenload.data.rows.chats.Budget", partial(Budget, left_s=left_s))
    folder = folder_with(f"{{% if messages | length == 5 %}}{template}{{% endif %}}" + PLAIN)
    rows = [{"messages": CHAT[:3]}, {"messages": CHAT}]
    with pytest.raises(EvenloadError, match=rf"fails on line 2 of .*\n.*{words}") as caught:
        read(write(tmp_path, rows), folder)
    assert folder.name in caught.value.found
    assert read(write(tmp_path, rows[:1]), folder)[0].report()["documents"] == 1


def test_rows_whose_template_is_slow_in_each_are_refused_together(tmp_path, folder_with, monkeypatch):
    monkeypatch.setattr("evenload.data.rows.chats.Budget", partial(Budget, left_s=0.3))
    slow = "{% for a in range(600) %}{% for b in range(600) %}{% endfor %}{% endfor %}"
    assert read(write(tmp_path, [{"messages": CHAT[:3]}] * 2), folder_with(slow + PLAIN))
    with pytest.raises(EvenloadError, match=r"fails on line .*\n.*too long"):
        read(write(tmp_path, [{"messages": CHAT[:3]}] * 1000), folder_with(slow + PLAIN))


@pytest.mark.parametrize("key", ["chat_template", "bos_token", "tokenize", "add_generation_prompt", "tools"])
def test_a_row_brings_no_template_of_its_own(tmp_path, plain_folder, key):
    """Nor anything else that the tokenizer or its folder says."""
    rows = [{"messages": CHAT}, {"messages": CHAT, "chat_template_kwargs": {key: "{{ 'other' }}", "more": 1}}]
    with pytest.raises(EvenloadError, match=rf"line 2 .* replaces what its tokenizer says\n.*: {key}\n"):
        read(write(tmp_path, rows), plain_folder)
    pair = {"prompt": CHAT[:2], "completion": [ANSWER], "chat_template_kwargs": {key: 1}}
    with pytest.raises(EvenloadError, match="replaces what its tokenizer says"):
        read(write(tmp_path, [pair]), plain_folder)


def test_a_template_whose_beginnings_differ_is_refused_with_the_row(tmp_path, folder_with):
    """Where no loop over messages tells where they begin."""
    by_number = PLAIN.replace(
        "message in messages %}", "i in range(messages | length) %}{% set message = messages[i] %}"
    )
    assert by_number != PLAIN
    folder = folder_with("{{ messages | length }}" + by_number)
    with pytest.raises(EvenloadError, match=r"beginning of line 1 .*\n.*message 2") as caught:
        read(write(tmp_path, [{"messages": CHAT}]), folder)
    assert "{% generation %}" in caught.value.do
    assert read(write(tmp_path, [{"messages": CHAT}]), folder, loss_on="all")[0].targets is None


JSON_ROWS = [
    {
        "messages": [QUESTION, {**ANSWER, "tool_calls": [{"function": {"name": "one", "arguments": arguments}}]}],
        "tools": [{"function": {"name": "one", "parameters": {"properties": properties}}}],
    }
    for arguments, properties in (
        ({"a": 1, "none": None}, {"a": {"type": ["integer", "null"], "default": None}}),
        ({"b": "x"}, {"b": [1, "x", {}]}),
    )
]
AS_JSON = PLAIN.replace("{{ message.content }}", "{{ message | tojson }}{{ tools | tojson }}{{ chat_template_kwargs }}")


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("whole", [None, "List", "Json"])
def test_json_of_datasets_is_what_it_holds(tmp_path, folder_with, kind, whole):
    """Parts of messages and tools, each message, and the whole list, with their nulls: as JSON Lines of them."""
    datasets = pytest.importorskip("datasets")
    json = datasets.Json()
    features = whole and datasets.Features(
        messages={"List": datasets.List(json), "Json": json}[whole], tools=datasets.List(json)
    )
    data = datasets.Dataset.from_list(JSON_ROWS, features=features, on_mixed_types=None if whole else "use_json")
    assert data[0] == JSON_ROWS[0]
    assert "json" in str(data.data.schema)
    folder = folder_with(AS_JSON)
    expected = read(write(tmp_path, JSON_ROWS), folder)[1]
    assert read(table(tmp_path, kind, data), folder)[1] == expected
    if whole == "List":
        (tmp_path / "named").mkdir()
        turns = table(tmp_path / "named", kind, data.rename_column("messages", "turns"))
        assert read(turns, folder, text_key="turns")[1] == expected


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_fields_that_arrow_adds_as_null_are_left_out_at_every_depth(tmp_path, folder_with, kind):
    """Arrow gives each struct the fields of all; a null in a list is no field."""
    rows = [
        {"messages": [QUESTION, {**ANSWER, "tool_calls": [{"function": {"arguments": arguments}}]}]}
        for arguments in ({"a": 1, "b": {"c": [2, None]}}, {"b": {"d": "x"}}, {"e": [{"f": 1}, {"g": 2}]})
    ]
    folder = folder_with(AS_JSON)
    assert read(table(tmp_path, kind, rows), folder)[1] == read(write(tmp_path, rows), folder)[1]


def test_other_extension_types_of_arrow_are_refused(tmp_path, plain_folder):
    pa = pytest.importorskip("pyarrow")
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16], pa.binary(16)))
    messages = pa.array([[{"role": "user", "content": "the name?"}]])
    inside = pa.StructArray.from_arrays([ids], ["id"])
    pa.parquet.write_table(pa.table({"messages": messages, "tools": inside, "id": ids}), tmp_path / "a.parquet")
    with pytest.raises(EvenloadError, match=r"column 'tools' of .* extension type.*\n.*extension<arrow.uuid>"):
        read(str(tmp_path / "a.parquet"), plain_folder)
    broken = pa.array(["{"], pa.json_())
    pa.parquet.write_table(pa.table({"messages": messages, "tools": broken}), tmp_path / "a.parquet")
    with pytest.raises(EvenloadError, match=r"column 'tools' of .* is not JSON"):
        read(str(tmp_path / "a.parquet"), plain_folder)


def test_chats_need_a_template(tmp_path, bare_folder):
    for tokenizer, words in (
        (bare_folder, "^there is no chat template for line 1"),
        ("bytes", "^chats need a chat template"),
    ):
        with pytest.raises(EvenloadError, match=words):
            read(write(tmp_path, [{"messages": CHAT}]), tokenizer)


def test_a_row_that_changes_while_it_is_in_use_is_noticed(tmp_path):
    source, _ = read(write(tmp_path, [{"input_ids": [1, 2], "labels": [-100, 3]}] * 2))
    write(tmp_path, [{"input_ids": [1], "labels": [1]}, {}])
    with pytest.raises(EvenloadError, match="changed while"):
        source.tokens(0)


def test_what_was_tokenised_is_read_without_the_tokenizer(tmp_path, plain_folder, monkeypatch):
    """Not even lengths need it again where only the tokens are left in the cache, or only the rest."""
    spec = write(tmp_path, [{"messages": CHAT}, {"messages": CHAT[:3]}])
    expected = read(spec, plain_folder)[1]
    cache = Path(os.environ["EVENLOAD_CACHE"])
    for ending in (".npz", ".tokens"):
        for entry in cache.glob(f"*{ending}"):
            entry.unlink()
        assert read(spec, plain_folder)[1] == expected
    monkeypatch.setattr(FolderTokenizer, "hub", None)
    assert read(spec, plain_folder)[1] == expected
    (entry,) = cache.glob("*.tokens")
    entry.write_bytes(entry.read_bytes()[:-4])
    with pytest.raises(EvenloadError, match=r"tokens is damaged\n"):
        read(spec, plain_folder)
