"""What the fuzz asks of evenload: strategies for requests that are wrong, odd, hostile, or by chance right.

A case is a dictionary that `child.py` runs: ``argv`` of the command or ``call`` (an expression over the Python face),
the ``files`` beside it and the ``env`` it finds. Keys of recipes are read off the schema, so new ones are drawn too.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

from evenload.api import load_plugins
from evenload.core.recipe.recipe import schema_type
from hypothesis import strategies as st
from pydantic import BaseModel

load_plugins()

Case = dict[str, Any]
Strategy = st.SearchStrategy


def pick(draw: st.DrawFn, options: Sequence[Any]) -> Any:
    return draw(st.sampled_from(options))


LENGTHS = "\n".join(str(2 + 7 * i % 50) for i in range(40)) + "\n"
SMALL = "model: {num_layers: 2, hidden_size: 16, num_attention_heads: 2}\ntrain: {global_batch_size: 4}\n"
RECIPES = {
    "packing": SMALL
    + "parallel: {dp: 2}\ndata: {max_length: 60}\nplugins: {packing: {enabled: true, max_tokens: 64}}\n",
    "mesh": SMALL + "parallel: {dp: 2}\ndata: {max_length: 60}\nplugins: {mesh: {enabled: true, max_tokens: 4096}}\n",
    "pipeline": SMALL + "parallel: {pp: 2}\ndata: {max_length: 60}\nplugins: {pipeline: {enabled: true}}\n",
    "moe": "train: {global_batch_size: 4}\n"
    + "model: {family: mixtral, num_layers: 2, hidden_size: 16, num_attention_heads: 2, moe: {num_experts: 4}}\n"
    + "parallel: {dp: 2, ep: 2}\ndata: {max_length: 60}\n"
    + "plugins: {packing: {enabled: true, max_tokens: 64}, moe: {enabled: true}}\n",
    "deepspeed": SMALL + "trainer: deepspeed\nparallel: {dp: 2}\ndata: {max_length: 60}\ndeepspeed: {zero_stage: 2}\n",
}
CLUSTER = """name: some
source: made up
ranks_per_node: 2
flops_per_s: 1.0e+12
launch_s: 1.0e-5
memory_bytes: 1.0e+11
intra: {latency_s: 1.0e-6, bytes_per_s: 1.0e+11}
inter: {latency_s: 1.0e-5, bytes_per_s: 1.0e+10}
host_bytes_per_s: 1.0e+10
"""
COSTS = """source: made up
forward: {launch_s: 1.0e-4, token_s: 1.0e-6, pair_s: 1.0e-10}
backward: {launch_s: 2.0e-4, token_s: 2.0e-6, pair_s: 2.5e-10}
memory: {activation_bytes_per_token: 1000, kv_bytes_per_token: 64, fixed_bytes: 1.0e+6}
num_layers: 2
update_s: 0.001
"""
TOTALS = "source: made up\ntotals: {token_s: 1.0e-6, square_s: 1.0e-10, launch_s: 0.01}\n"


def keys(model: Any = None, above: tuple[str, ...] = ()) -> list[str]:
    """Every dotted key of a recipe, sections and their fields."""
    names = []
    for name, field in (model or schema_type()).model_fields.items():
        names.append(".".join((*above, name)))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += keys(field.annotation, (*above, name))
    return names


KEYS = keys()


def bomb(levels: int) -> str:
    """Aliases that stand for 9 to the power of ``levels`` values."""
    rows = ["&b0 [l, l, l, l, l, l, l, l, l]"]
    rows += [f"&b{i} [{', '.join([f'*b{i - 1}'] * 9)}]" for i in range(1, levels)]
    return f"[{', '.join(rows)}]"


INTEGERS = ["-1", "0", "1", "2", "3", "7", "16", "4096", "100000", "9223372036854775808", "1" + "0" * 30, "1" * 5000]
NUMBERS = [".nan", ".inf", "-.inf", "1e400", "1.0e-320", "-0.0", "0.5", "1.5", "1e18", "1.0e+308", "-1.0e+308", "0x10"]
NUMBERS += ["0o17", "1_000", "1:30:45", "0x" + "f" * 5000, "0b" + "1" * 9000, "1:" + "0:" * 3000 + "0", "\u0661"]
TEXTS = ['""', "' '", r'"\x00"', r'"\ud800"', r'"\e[31m"', '"a\\nb"', "\U0001f600", '"\u202eevil"', "a" * 3000, "%s"]
TEXTS += ["{0}", '"[/]"', '"[bold]x[/bold]"', '"[link=http://x]"', "'$\\frac{'", "'<script>'", ":smile:", "auto", "off"]
TEXTS += ["ring"]
PATHS = ["/", ".", "/dev/zero", "/dev/stdin", "/proc/self/mem", "../..", "~nobody/x", "~", "a" * 300, "a/" * 500 + "b"]
PATHS += ["nope.yaml", "pipe", "folder", "loop", "a.yaml/b", '"\\0.yaml"', "/dev/full", "sub/x.json", "ok.txt", "*"]
PATHS += ["**"]
SHAPES = ["[]", "{}", "[1]", "{a: 1}", "{1: 2}", "{null: 1}", "{[1]: 2}", "null", "~", "true", "[[1], [2]]", "[1, x]"]
TAGS = ["2001-01-01", "2001-99-99", "2001-01-01 99:99:99", "!!binary aGVsbG8=", '!!binary "@@"', "!!set {a, b}"]
TAGS += ['!!int "x"', '!!float ""', '!!timestamp "x"', "!!omap [1]", "!x y"]
TAGS += ['!!python/object/apply:os.system ["touch PWNED"]', "!!python/name:os.system", "!!python/module:antigravity"]
BROKEN = ["*a", "&a [*a]", "&a {b: *a}", "<<", "=", "@", "`", "%", '"', "'", "[" * 3000, "{a: " * 2000, "- - -", "? "]
BROKEN += [bomb(9), bomb(3), "&a 1", "[", "]", ": ", "a: b: c", "\t", "# x", "---\n1\n---\n2", "&" + "a" * 2000 + " 1"]
NASTY = [*INTEGERS, *NUMBERS, *TEXTS, *PATHS, *SHAPES, *TAGS, *BROKEN]

values: Strategy[str] = st.one_of(
    st.sampled_from(NASTY),
    st.sampled_from(INTEGERS),
    st.integers(-5, 70).map(str),
    st.floats(width=32).map(repr),
    st.text(max_size=12),
)
words: Strategy[str] = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


def typed(text: str) -> str:
    """A value as the command line can carry it: without NUL, and no longer than the kernel allows."""
    return text.replace("\0", "")[:100_000].encode("utf-8", "replace").decode()


special: Strategy[Case] = st.one_of(
    st.sampled_from([{"kind": "pipe"}, {"kind": "folder"}, {"kind": "hole", "size": 1 << 40}]),
    st.sampled_from(["nowhere", "self", "/dev/zero", "/dev/stdin", "/dev/full", "/dev/null", "/proc/self/mem"]).map(
        lambda to: {"kind": "link", "to": to}
    ),
)
raw: Strategy[Case] = st.one_of(
    st.binary(max_size=60).map(lambda data: {"hex": data.hex()}),
    st.sampled_from(
        [
            {"text": ""},
            {"text": "\n"},
            {"text": "- 1\n"},
            {"text": "null"},
            {"text": "[" * 100_000},
            {"text": "{a: " * 20_000},
            {"text": '{"a":', "times": 100_000},
            {"text": "- ", "times": 100_000},
            {"text": "# comment\n", "times": 200_000},
            {"text": "x" * 50, "times": 20_000},
            {"hex": "00", "times": 2_000_000},
            {"hex": "ff", "times": 100_000},
            {"hex": "efbbbf"},
            {"hex": "fffe61003a00"},
            {"text": "\ud800"},
            {"text": f"a: {bomb(9)}"},
            {"text": f"plugins: {bomb(9)}"},
            {"text": f"deepspeed: {{config: {{x: {bomb(9)}}}}}"},
            {"text": f"deepspeed: {{config: {{x: {bomb(5)}}}}}"},
            {"text": "".join(f"x{i}: &x{i} [{f'*x{i - 1}' if i else '1'}]\n" for i in range(5000))},
            {"text": "a: &a {k: 1}\n" + "".join(f"b{i}: &b{i} {{<<: [*a, *a]}}\n" for i in range(30))},
            {"text": "".join(f"k{i}: 1\n" for i in range(50_000))},
        ]
    ),
)


@st.composite
def put(draw: st.DrawFn, text: str) -> Case:
    """A YAML text with one value replaced, one line dropped, or one line doubled."""
    lines = text.splitlines()
    place = draw(st.integers(0, len(lines) - 1))
    how = pick(draw, ["inner", "value", "value", "drop", "twice", "unknown"])
    head, _, rest = lines[place].partition(": ")
    if how == "inner" and rest.startswith("{"):
        parts = rest[1:-1].split(", ")
        at = draw(st.integers(0, len(parts) - 1))
        parts[at] = f"{parts[at].split(':')[0]}: {draw(values)}"
        lines[place] = f"{head}: {{{', '.join(parts)}}}"
    elif how in ("inner", "value"):
        lines[place] = f"{head}: {draw(values)}"
    elif how == "drop":
        del lines[place]
    else:
        lines.insert(place, lines[place] if how == "twice" else f"{draw(words)}: {draw(values)}")
    return {"text": "\n".join(lines) + "\n"}


@st.composite
def recipe_text(draw: st.DrawFn) -> Case:
    """A recipe of its own: some keys, each with a value of any kind, in the block style."""
    tree: dict[str, Any] = {}
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)):
        *above, last = key.split(".")
        node = tree
        for name in above:
            node = node.setdefault(name, {}) if isinstance(node.get(name, {}), dict) else node
        node[last] = draw(values)
    return {"text": _block(tree, "")}


def _block(tree: dict[str, Any], indent: str) -> str:
    return "".join(
        f"{indent}{key}:\n{_block(value, indent + '  ')}" if isinstance(value, dict) else f"{indent}{key}: {value}\n"
        for key, value in tree.items()
    )


def _npy(header: str, data: bytes) -> bytes:
    text = header.encode("utf-8", "replace")
    text += b" " * (-(10 + len(text) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) & 0xFFFF) + text + data


@st.composite
def npy(draw: st.DrawFn) -> Case:
    """A .npy file whose header says anything."""
    descr = pick(
        draw, ["'<i8'", "'>i4'", "'|u1'", "'<f8'", "'|O'", "'|b1'", "'<M8[s]'", "[('a', '<i8')]", "5", "'<U9'"]
    )
    shape = pick(
        draw, ["(40,)", "(3,)", "(0,)", "()", "(2, 2)", "(-5,)", "(True,)", "(10000000000000,)", "'x'", "(1.5,)"]
    )
    head = pick(draw, ["", "", "", "(" * 5000, "{" * 100, "__import__('os').system('touch PWNED')", "\0"])
    header = head or f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    data = pick(draw, [b"\7\0\0\0\0\0\0\0" * 40, b"", b"\xff" * 320, b"\0" * 320, b"\7" * 320])
    magic = pick(draw, [b"", b"", b"", b"PK\3\4", b"\x80\4"])
    cut = pick(draw, [None, None, 7, 20, 100])
    return {"hex": (magic + _npy(header, data))[:cut].hex()}


@st.composite
def txt(draw: st.DrawFn) -> Case:
    lines = draw(
        st.lists(
            st.one_of(st.sampled_from(["5", "40", "1099511627776", "1e3", "nan", "", *INTEGERS]), words), max_size=6
        )
    )
    end = pick(draw, ["\n", "\r\n", "\r", "\x0b", " "])
    return {"text": end.join([*lines, *["9"] * pick(draw, [0, 40])]), "times": pick(draw, [1, 1, 50])}


ROWS = ['{"length": 9}', "9", '{"text": "abc def"}', '{"input_ids": [1, 2, 3]}', '{"tokens": [1, 1099511627776]}']
ROWS += ['{"length": 5.5}', "NaN", "Infinity", "true", "null", '"5"', "-5", "0", "1" + "0" * 5000, "1e400", "[" * 5000]
ROWS += ['{"a":' * 5000, "[1, 2]", '{"foo": 5}', '{"length": [5]}', '{"input_ids": []}', '{"input_ids": [1, -2]}', "{"]
ROWS += ["", '{"text": "\\ud800"}', '{"text": ""}', '{"text": null}', '{"length": 1, "length": 2}', '{"": 1}']
ROWS += ['{"text": {"a": 1}}', '{"prompt": 9, "completions": [4, 5]}', '{"prompt": 5, "chosen": 1, "rejected": 2}']
ROWS += [
    '{"prompt": 5}',
    '{"prompt": 0, "completions": [1]}',
    '{"completions": {"a": [1]}}',
    '{"prompt": 2, "completions": [1e9]}',
]


@st.composite
def jsonl(draw: st.DrawFn) -> Case:
    rows = draw(st.lists(st.one_of(st.sampled_from(ROWS[:4]), st.sampled_from(ROWS)), max_size=5))
    return {"text": "\n".join([*rows, *[pick(draw, ROWS[:4])] * pick(draw, [0, 30])])}


FIELDS = ({"prompt": '"a"', "completion": '"bc"'}, {"input_ids": "[1, 2, 3]", "labels": "[-100, 7, 3]"})
FIELDS += ({"messages": ""},)
CHAT = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
PARTS = ["null", "1", '""', '"\\ud800"', "[]", "[1, 2, 3]", "[-100, -100, -100]", "[-1, 2, 3]", "[1e400]", "[null]"]
PARTS += [CHAT, '[{"role": "usr", "content": 1}]', "[{}]", "[[]]", "1" + "0" * 5000, "[" * 40 + "]" * 40]


@st.composite
def targets(draw: st.DrawFn) -> Case:
    """JSON Lines of prompts, labels or chats: thirty good rows behind some with an odd part, or with one more."""
    good = {name: part or CHAT for name, part in pick(draw, FIELDS).items()}
    rows = []
    for _ in range(draw(st.integers(0, 3))):
        row = {**good, pick(draw, [*good, "text", "messages", "tools"]): pick(draw, PARTS)}
        dropped = pick(draw, [*good, None, None, None])
        rows.append({name: part for name, part in row.items() if name != dropped})
    pairs = [", ".join(f'"{name}": {part}' for name, part in row.items()) for row in [*rows, *[good] * 30]]
    return {"text": "\n".join(f"{{{row}}}" for row in pairs)}


@st.composite
def idx(draw: st.DrawFn) -> Case:
    """A Megatron index of eight sequences with some bytes changed."""
    good = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 8, 9) + struct.pack("<8i", *[10] * 8)
    data = bytearray(good + struct.pack("<8q", *[20 * i for i in range(8)]) + struct.pack("<9q", *range(9)))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = pick(draw, [0, 1, 127, 128, 255])
    return {"hex": bytes(data)[: pick(draw, [None, None, 10, 60, 150])].hex()}


OF_SUFFIX: dict[str, Strategy[Case]] = {".npy": npy(), ".txt": txt(), ".jsonl": jsonl(), ".idx": idx()}


def beside(**more: Case) -> Case:
    """The files that every case finds."""
    odd = {"pipe": {"kind": "pipe"}, "folder": {"kind": "folder"}, "loop": {"kind": "link", "to": "loop"}}
    return {**odd, "ok.txt": {"text": LENGTHS}, **more}


def request(verb: str, *rest: str, recipe: str = "r.yaml", lengths: str = "ok.txt") -> list[str]:
    """The words of a verb; ``run`` takes no overrides."""
    if verb == "run":
        return ["run", recipe, "--", "true"]
    return [verb, recipe, *rest, *(["--lengths", lengths] if verb == "plan" else [])]


VERBS = ("plan", "plan", "plan", "train", "verify", "bench", "profile")
json_or_not = st.sampled_from([["--json"], []])


@st.composite
def overrides(draw: st.DrawFn) -> Case:
    """``key=value`` words: every key of the schema, and what is none."""
    some_keys = st.one_of(st.sampled_from(KEYS), st.sampled_from(ODD_KEYS), words)
    pairs = draw(st.lists(st.tuples(some_keys, values), min_size=1, max_size=2))
    settings = [typed(f"{key}={value}") for key, value in pairs]
    if draw(st.integers(0, 20)) == 0:
        settings.append(typed(draw(words)))
    recipe = pick(draw, sorted(RECIPES))
    argv = request(pick(draw, VERBS), *settings, *draw(json_or_not))
    return {"argv": argv, "files": beside(**{"r.yaml": {"text": RECIPES[recipe]}})}


ODD_KEYS = ["a.b", "plugins.nope.x", "model.__class__", "model_config", "deepspeed.config.a.b", "a" * 3000]
ODD_KEYS += ["a." * 3000 + "b", ".", "..", "model.", ".model", "model..x", "Model.num_layers", " model.num_layers"]
ODD_KEYS += ["plugins.packing.enabled.x"]


@st.composite
def recipe_files(draw: st.DrawFn) -> Case:
    recipe = st.sampled_from(sorted(RECIPES)).flatmap(lambda name: put(RECIPES[name]))
    content = draw(st.one_of(recipe_text(), recipe, raw, special))
    argv = request(pick(draw, [*VERBS, "run"]), *draw(json_or_not))
    argv = [word for word in argv if argv[0] != "run" or word != "--json"]
    return {"argv": argv, "files": beside(**{"r.yaml": content})}


@st.composite
def machine_files(draw: st.DrawFn) -> Case:
    """Clusters and cost models, planned for with whatever they say."""
    what = pick(draw, ["cluster", "costs"])
    text = CLUSTER if what == "cluster" else pick(draw, [COSTS, TOTALS])
    content = draw(st.one_of(put(text), put(text), put(text), raw, special))
    recipe = pick(draw, sorted(RECIPES))
    verb = pick(draw, ["plan", "plan", "plan", "train"])
    argv = request(verb, f"{what}=c.yaml", *draw(json_or_not))
    return {"argv": argv, "files": beside(**{"r.yaml": {"text": RECIPES[recipe]}, "c.yaml": content})}


@st.composite
def length_files(draw: st.DrawFn) -> Case:
    suffix = pick(draw, sorted(OF_SUFFIX))
    content = draw(st.one_of(OF_SUFFIX[suffix], OF_SUFFIX[suffix], raw, special))
    name = pick(draw, [f"l{suffix}", f"l{suffix}", f"l{suffix}", "l.csv", "l", ".npy", f"l{suffix.upper()}"])
    long = pick(draw, [[], ["data.long_samples=drop"], ["data.long_samples=truncate"], ["data.max_length=2"]])
    argv = request("plan", *long, *draw(json_or_not), lengths=name)
    if draw(st.integers(0, 5)) == 0:
        argv += ["--sweep", "parallel.dp=1,2"]
    return {"argv": argv, "files": beside(**{"r.yaml": {"text": RECIPES["packing"]}, name: content})}


LOADS = ['{"format": 1, "experts": 4, "topk": 2, "layers": [0, 1], "ranks": 2, "ep": 2}']
LOADS += [
    f'{{"step": {step}, "counts": [[[[9, 0, {step}, 4], [1, 2, 3, 4]], [[0, 0, 0, 8], [0, 8, 0, 0]]]]}}'
    for step in range(4)
]


@st.composite
def load_files(draw: st.DrawFn) -> Case:
    """Recorded loads: a number replaced, a line changed, dropped or cut short, or what is none."""
    lines = list(LOADS)
    place = draw(st.integers(0, len(lines) - 1))
    how = pick(draw, ["number", "number", "line", "drop", "twice", "cut", "whole"])
    if how == "number":
        at = pick(draw, [found.span() for found in re.finditer(r"\d+", lines[place])])
        lines[place] = lines[place][: at[0]] + draw(values) + lines[place][at[1] :]
    elif how == "line":
        lines[place] = draw(st.one_of(st.sampled_from(ROWS), st.sampled_from(LOADS), words))
    elif how == "drop":
        del lines[place]
    elif how == "twice":
        lines.insert(place, lines[place])
    text = "".join(f"{line}\n" for line in lines)
    content = {"text": text[: draw(st.integers(0, len(text)))] if how == "cut" else text}
    files = {"r.yaml": {"text": RECIPES["moe"]}, "loads.jsonl": draw(st.one_of(st.just(content), raw, special))}
    argv = request("plan", "--loads", "loads.jsonl", f"parallel.ep={pick(draw, [1, 2, 4])}", "parallel.dp=4")
    return {"argv": [*argv, *draw(json_or_not)], "files": beside(**files)}


CONFIG = (
    '{"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300, '
)
CONFIG += '"intermediate_size": 32}'


@st.composite
def data_files(draw: st.DrawFn) -> Case:
    """What training reads: samples, tokenizers, the config of a model."""
    what = pick(
        draw, ["jsonl", "targets", "targets", "idx", "bin", "arrow", "parquet", "state", "tokenizer", "config", "name"]
    )
    files: Case = {"r.yaml": {"text": RECIPES["deepspeed" if what == "config" else "packing"]}}
    anything = st.one_of(raw, special)
    if what in ("jsonl", "idx"):
        files[f"d.{what}"] = draw(st.one_of(OF_SUFFIX[f".{what}"], OF_SUFFIX[f".{what}"], anything))
        files["d.bin"] = draw(st.one_of(st.just({"hex": "0500", "times": 80}), anything))
        setting = f"data.source=d.{what}"
    elif what == "targets":
        files["d.jsonl"] = draw(targets())
        setting = "data.source=d.jsonl"
    elif what == "state":
        files["d"] = {"kind": "folder"}
        files["d/state.json"] = draw(st.one_of(st.sampled_from(STATES).map(lambda text: {"text": text}), anything))
        setting = "data.source=d"
    elif what == "config":
        fields = st.sampled_from(["16", "0", "-1", '"x"', "null", "[1]", "1e400", "1" + "0" * 5000, "true", "2.5"])
        odd = st.tuples(st.sampled_from(["16", "2", "300", "32"]), fields).map(lambda pair: CONFIG.replace(*pair, 1))
        files["c.json"] = draw(st.one_of(odd.map(lambda text: {"text": text}), anything))
        setting = "model.config=c.json"
    elif what == "name":
        key = pick(draw, ["data.source", "data.tokenizer", "model.config", "cluster", "costs"])
        setting = typed(f"{key}={draw(values)}")
    else:
        files[f"d.{what}"] = draw(anything)
        setting = f"data.tokenizer=d.{what}" if what == "tokenizer" else f"data.source=d.{what}"
    argv = request(pick(draw, ["train", "verify", "bench", "plan"]), setting)
    return {"argv": argv, "files": beside(**files)}


STATES = ["[]", "{}", '{"_data_files": 1}', '{"_data_files": [1]}', '{"_data_files": [{"filename": "../ok.txt"}]}']
STATES += ['{"a": NaN}', '{"_data_files": []}', '{"_data_files": [{"filename": 5}]}']
STATES += ['{"_data_files": [{"filename": "\\u0000"}]}', '{"_data_files": {}}']

COUNTS = ["-1", "0", "1", "2", "3", "7", "100000", "1000000000000", "9223372036854775808", "1" * 5000, "1.5", "nan", ""]
COUNTS += [" ", "x", "0x10", "1e3", "\u0661", "--", "-", "1 ", "+2", "1_0", "2\n", "True", "\udcff"]
OUTS = ["out.json", "t.html", "t.json.gz", "pipe", "folder", "loop", "/nope/x.json", "/dev/full", "/dev/null"]
OUTS += ["a" * 300 + ".json", "", ".", "-", "sub/x.json", "\udcff.json", "x\ny.html", "/proc/x.json", "~nobody/x.json"]
OUTS += ["a" * 300 + ".html", "loop.html"]
SWEEPS = ["parallel.dp=1,2", "parallel.cp=1,2", "a", "=", "=1", "parallel.cp=", "parallel.cp=,", "parallel.cp=1,1"]
SWEEPS += ["parallel.cp=1,true", "parallel.cp=" + ",".join(map(str, range(1, 300))), "parallel={cp: 1},{cp: 2}"]
SWEEPS += ["plugins.packing.enabled=on,off", "cluster=a100,nope", 'data.text_key="[/]",b', 'data.text_key="[bold]",b']
SWEEPS += ["train.lr=.nan,.nan", "deepspeed.config.x=1,2", "parallel.cp=]", "parallel.cp=1], [2", "parallel.cp=*a"]
SWEEPS += ["train.lr=2001-99-99,1", 'data.text_key="$\\\\frac{",":smile:"']
AGAINST = ["stock", "nope", "stock,stock", ",", " stock ", "STOCK", "[/]", "stock," * 500, "stock\n", "__class__", ""]
AGAINST += ["in_order"]


@st.composite
def arguments(draw: st.DrawFn, pictures: tuple[str, ...] = ("--out", "--report", "--trace", "--plot")) -> Case:
    """Options of every verb with values of any kind, words that are none, and too few of them."""
    verb = pick(
        draw, ["plan", "plan", "plan", "train", "verify", "bench", "profile", "run", "schema", "plugins", "nope"]
    )
    recipe = pick(draw, ["r.yaml"] * 8 + ["", "nope.yaml", "-", "--", "folder", "pipe", "a" * 9000, "http://x/r.yaml"])
    argv = request(verb, recipe=recipe) if verb not in ("schema", "plugins", "nope") else [verb]
    options: dict[str, Strategy[str]] = {
        "--nproc": st.sampled_from(COUNTS),
        "--steps": st.sampled_from(COUNTS),
        "--repeats": st.sampled_from(COUNTS),
        "--sweep": st.one_of(st.sampled_from(SWEEPS), values.map(lambda text: typed(f"data.text_key={text},b"))),
        "--against": st.sampled_from(AGAINST),
        "--lengths": st.sampled_from(
            ["ok.txt", "", "-", "folder", "pipe", "loop", "/dev/zero", "nope.txt", "\udcff.txt", "~nobody/x.txt"]
        ),
        **{name: st.sampled_from(OUTS) for name in pictures},
    }
    of_verb = {
        "plan": ["--nproc", "--nproc", "--steps", "--sweep", "--lengths", *pictures],
        "bench": ["--repeats", "--against", "--nproc"],
        "profile": ["--out", "--nproc"],
    }.get(verb, ["--nproc", "--against", "--trace"])
    for option in draw(st.lists(st.sampled_from(of_verb), max_size=3)):
        argv += [option, typed(draw(options.get(option, words)))]
    argv += pick(
        draw, [[], [], [], ["--json"], ["--json"], ["parallel.dp=null"], ["-x"], ["[/]"], ["--help"], ["--nproc"]]
    )
    if draw(st.integers(0, 15)) == 0:
        argv = draw(st.lists(st.sampled_from([*argv, "", "--", "-", "\U0001f600"]), max_size=6))
    return {"argv": argv, "files": beside(**{"r.yaml": {"text": RECIPES[pick(draw, sorted(RECIPES))]}})}


PLACES = ["x", "", "-1", "0", "1", "2", "5", "99999", "65536", "1e3", "nan", " 1", "1" * 30, "\u0663", "0x1"]
HOSTS = ["127.0.0.1", "localhost", "a b", "x" * 300, "", "999.1.1.1", "[::1]", "..", "\udcff", "::1"]
OTHERS = {
    "EVENLOAD_CACHE": ["/dev/null", "/dev/null/x", "pipe", "a" * 300, "~nobody/x", "/proc/x", ""],
    "COLUMNS": ["x", "0", "-1", "1", "99999999999999", ""],
    "TERM": ["", "dumb", "nope"],
    "FORCE_COLOR": ["1", ""],
    "HOME": ["", "/nope", "/dev/null"],
    "LOCAL_WORLD_SIZE": PLACES,
    "PYTHON_EVENLOAD": ["x", "eJw="],
    "TORCHELASTIC_RESTART_COUNT": ["x"],
}


@st.composite
def environments(draw: st.DrawFn, hosts: tuple[str, ...] = tuple(HOSTS)) -> Case:
    """Variables of torchrun that make no sense, and a few others that are read."""
    choices = {
        **dict.fromkeys(["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"], PLACES),
        "MASTER_ADDR": list(hosts),
        **OTHERS,
    }
    good = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    env = dict(good) if draw(st.booleans()) else {}
    for name in draw(st.lists(st.sampled_from(sorted(choices)), max_size=3)):
        env[name] = pick(draw, choices[name])
    for name in draw(st.lists(st.sampled_from(sorted(good)), max_size=1)):
        env.pop(name, None)
    verb = pick(draw, ["train", "train", "verify", "bench", "profile", "plan"])
    more = pick(draw, [[], ["--json"], ["log.trace=t.json"]])
    return {"argv": request(verb, *more), "env": env, "files": beside(**{"r.yaml": {"text": RECIPES["packing"]}})}


BATCHES = ["None", "5", "'abc'", "''", "[]", "[0]", "[-1]", "[1]", "[2**63]", "[2**100]", "[1.5]", "[5.0]", "['x']"]
BATCHES += ["[None]", "[[1, 2]]", "np.array([1, 2, 3])", "np.array([[1]])", "np.array([1.5])", "np.array([np.nan])"]
BATCHES += ["np.array([np.inf])", "[float('nan')]", "{1: 2}", "{1, 2}", "(x for x in [5, 6])", "[True, False]"]
BATCHES += ["b'abc'", "[10**9] * 3", "[2**40] * 3", "[1] * 5", "[[]]", "np.array([], int)", "np.array(5)", "[5, -5]"]
BATCHES += ["['5', '6']", "range(1, 50)", "np.array([2**64 - 1], np.uint64)", "iter([])", "[np.int8(5)]"]
BATCHES += ["[complex(1)]", "object()", "['1_0']", "itertools.count(1)", "map(int, 'ab')", "np.ones(4, bool)", "[b'5']"]
BATCHES += ["np.array(['5'])", "np.zeros(3, 'M8[s]')", "type", "[2**40] * 2**10"]
WORLDS = ["None", "None", "None", "0", "-1", "1", "2", "3", "'x'", "2.0", "10**6", "10**30", "True", "np.int64(2)"]
WORLDS += ["[2]"]
FILES = ["'r.yaml'", "'r.yaml'", "'r.yaml'", "None", "5", "''", "'nope'", "b'x'", "{}", "[]", "object()", "'\\0'"]
FILES += ["5.5", "True", "'pipe'", "'folder'", "'loop'", "'/dev/zero'", "'a' * 5000", "'\\udcff'"]
FILES += ["evenload.load_recipe('r.yaml')"]
MORE = ["()", "()", "['train.steps=7']", "None", "5", "'train.steps=7'", "[5]", "[None]", "['']", "['=']", "{'a': 1}"]
MORE += ["[b'a=1']"]


@st.composite
def faces(draw: st.DrawFn) -> Case:
    """The Python face with arguments of any kind."""
    batch = draw(st.one_of(st.sampled_from(BATCHES), st.lists(st.integers(-3, 60), max_size=6).map(repr)))
    recipe, world, more = (pick(draw, options) for options in (FILES, WORLDS, MORE))
    call = pick(draw, [f"evenload.plan({recipe}, {batch}, {world})"] * 3 + [f"evenload.load_recipe({recipe}, {more})"])
    name = pick(draw, sorted(RECIPES))
    return {"call": call, "files": beside(**{"r.yaml": {"text": RECIPES[name]}})}


@st.composite
def plan_files(draw: st.DrawFn) -> Case:
    """Files that are no plan.json; `test_plan_json` tampers with ones that are."""
    rows = [
        '{"format": 1, "steps": []}',
        '{"format": 1, "steps": [{}]}',
        '{"format": 1, "caps": 5, "steps": []}',
        '{"format": 2}',
    ]
    rows += ['{"format": true, "steps": []}', '{"steps": [[]]}', "[]", "null", "NaN", '{"format": 1, "steps": [[1]]}']
    content = draw(st.one_of(st.sampled_from(rows).map(lambda text: {"text": text}), raw, special))
    path = pick(draw, ["'p.json'"] * 8 + ["None", "5", "'nope'", "'\\0'", "'folder'"])
    return {"call": f"read_plans({path})", "files": beside(**{"p.json": content})}


SECTIONS = ["None", "0", "''", "'x'", "[]", "True", "float('nan')", "{'packing': None}"]
SECTIONS += ["{'packing': {'enabled': 'auto'}}", "{'packing': {'max_tokens': 10**400}}"]
SECTIONS += ["{'packing': {'max_tokens': float('nan')}}", "{'recipe': '\\0'}", "{1: 2}", "{None: 1}", "{'': {}}"]
SECTIONS += ["{'packing': {1: 2}}", "{'mesh': {'engines': {'a': 1}}}", "{'packing': {'max_tokens': object()}}"]
SECTIONS += ["{'recipe': 'pipe'}", "{'recipe': 'a' * 5000}", "{'recipe': 'r.yaml', 'packing': {'max_tokens': 5}}"]
SECTIONS += ["{'recipe': 1}"]


@st.composite
def sections(draw: st.DrawFn) -> Case:
    """The ``evenload`` section of a script's ds_config."""
    leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), words, st.just([]), st.just({}))
    names = st.one_of(
        st.sampled_from(["packing", "mesh", "pipeline", "recipe", "enabled", "max_tokens", "slices"]), words
    )
    drawn = st.dictionaries(names, st.one_of(leaf, st.dictionaries(names, leaf, max_size=3)), max_size=3)
    some = drawn.map(lambda value: repr(value).replace("nan", "float('nan')").replace("inf", "float('inf')"))
    section = draw(st.one_of(st.sampled_from(SECTIONS), some))
    base = pick(draw, ["None", "evenload.load_recipe('r.yaml')"])
    call = f"recipe_of(parse_section({section}), {base})"
    return {"call": call, "files": beside(**{"r.yaml": {"text": RECIPES["deepspeed"]}})}
