"""What one step of plan.json must keep, worked out again from the recipe: no line of evenload is imported here.

`refuse` reads the plan and the recipe as the plain data of their files. Caps, ranks, stages, layers and heads come from
the recipe alone, since a plan that says under which cap it stands proves nothing. Tokens of ranks are counted by
dealing them out, orders are judged by carrying them out: ranks of stages walk their lists, wait for their neighbours
and for those that share a pass, and find the keys, values and activations there that they need, or do not.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ENGINES = ("", "ring", "all_gather", "all_to_all", "hybrid")
TOKENS = {"packing": 16384, "mesh": None, "pipeline": 16384}
"""Caps of sections that leave ``max_tokens`` out."""

Plan = dict[str, Any]
MicroBatch = dict[str, Any]


class BrokenError(Exception):
    """A plan that nobody may run."""


def require(kept: bool, *words: object) -> None:
    if not kept:
        raise BrokenError(" ".join(map(str, words)))


@dataclass(frozen=True)
class Facts:
    """What a recipe says of every plan."""

    ranks: int
    stages: int
    layers: int
    heads: int
    max_tokens: float
    activation_bytes: float
    in_step: bool
    """Every rank runs as many micro-batches as the others, at the same places (ZeRO 3)."""
    together: int
    """Neighbouring ranks that share experts, and so run every pass at once."""
    splits: bool
    """Weight gradients may be passes of their own."""
    v_shape: bool = False
    """Stages s and stages - 1 - s are on one device, which runs one pass at a time."""
    whole: bool = False
    """Sequences stay whole, and run backward as they ran forward."""
    padded: bool = False
    """The sequences of a micro-batch are whole, and of one length or padded to one."""
    round_tokens: int = 1
    """A micro-batch with slices on one rank and not in padded rows has a multiple of so many tokens."""
    layer_bytes: float = 0.0
    """What a kept token leaves in a layer at the least, where layers are kept whole."""
    input_bytes: float = 0.0
    """The same where the layer runs again."""


def facts_of(recipe: dict[str, Any]) -> Facts:
    """Of nested dictionaries, as YAML gives them; keys that are left out have the documented defaults."""
    parallel, model = recipe.get("parallel", {}), recipe.get("model", {})
    tp, pp, cp, dp = (parallel.get(name) or 1 for name in ("tp", "pp", "cp", "dp"))
    sections = {name: s for name, s in recipe.get("plugins", {}).items() if s.get("enabled")}
    tokens = [s.get("max_tokens", TOKENS.get(name)) for name, s in sections.items()]
    gib = [s.get("activation_gib") for s in sections.values()]
    deepspeed = recipe.get("trainer") == "deepspeed"
    v_shape = sections.get("pipeline", {}).get("v_shape", False)
    stages = 2 * pp if v_shape else pp
    return Facts(
        ranks=dp * cp,
        stages=stages,
        layers=model.get("num_layers", 4) // stages,
        v_shape=v_shape,
        heads=model.get("num_attention_heads", 8) // tp,
        max_tokens=min((cap for cap in tokens if cap is not None), default=float("inf")),
        activation_bytes=min((cap * 2.0**30 for cap in gib if cap is not None), default=float("inf")),
        in_step=deepspeed and recipe.get("deepspeed", {}).get("zero_stage", 1) == 3,
        together=parallel.get("ep") or 1,
        splits=not deepspeed or pp > 1,
        padded=bool(sections.get("packing", {}).get("padded")),
        round_tokens=sections.get("packing", {}).get("round_tokens", 1),
    )


def refuse_quotas(quotas: list[list[int]], counts: list[list[int]], experts: dict[str, Any], layer: int) -> None:
    """Raise BrokenError where a layer's quotas (of each expert by rank) are not those of its counts (of each rank by
    expert): a token is run once, and only by ranks that have its expert or a slot for it. ``experts``: of the plan."""
    ranks, own = len(counts), len(counts[0]) // len(counts)
    copies = experts["copies"][layer] if experts["copies"] else []
    taken = [0] * ranks
    for expert, row in enumerate(quotas):
        require(len(row) == ranks and all(tokens >= 0 for tokens in row), "expert", expert, "has quotas", row)
        require(sum(row) == sum(of_rank[expert] for of_rank in counts), "expert", expert, "has other tokens")
        for rank, tokens in enumerate(row):
            if tokens and expert // own != rank:
                taken[rank] += 1
                require(not copies or expert in copies[rank], "rank", rank, "has no copy of expert", expert)
    require(max(taken) <= experts["slots"], "a rank has", max(taken), "copies")
    home = [sum(sum(of_rank[e] for of_rank in counts) for e in range(r * own, r * own + own)) for r in range(ranks)]
    busiest = max(sum(row[rank] for row in quotas) for rank in range(ranks))
    exact = experts["planner"] in ("clone", "reroute")
    require(not exact or busiest <= max(home), "the busiest rank has", busiest, "tokens, at home", max(home))


def refuse(plan: Plan, facts: Facts) -> None:
    """Raise BrokenError with the first thing that a plan of one step breaks."""
    lengths = plan["lengths"]
    require(all(n >= 1 for n in lengths), "a sequence without tokens")
    require(plan["num_ranks"] == facts.ranks, "the plan is for", plan["num_ranks"], "ranks")
    directions = {"F": plan["micro_batches"], "B": plan["backward"] or plan["micro_batches"]}
    cut = _cut(plan)
    require(not (facts.whole and cut), "sequences are cut:", cut)
    for name, micro_batches in directions.items():
        for number, m in enumerate(micro_batches):
            _refuse_micro_batch(f"{name}{number}", m, lengths, cut, facts)
            _refuse_trunks(f"{name}{number}", m, trunks_of(plan), cut)
        _refuse_tokens(name, micro_batches, lengths, trunks_of(plan))
    _refuse_launches(directions["F"], cut)
    _refuse_backward(plan, cut, facts)
    _refuse_rows(plan, facts)
    rows = _rows(plan, facts)
    twins = _twins(plan)
    turns = _turns(plan, facts)
    for device in _devices(facts):
        _refuse_memory(plan, facts, device, rows, turns, twins)
    _carry_out(plan, facts, rows, turns, twins)


def _cut(plan: Plan) -> set[int]:
    """Sequences that are not whole somewhere."""
    lengths, trunks = plan["lengths"], trunks_of(plan)
    slices = [s for m in (*plan["micro_batches"], *plan["backward"]) for s in m["slices"]]
    return {i for i, start, stop in slices if 0 <= i < len(lengths) and stop - start < lengths[i] - trunks[i]}


def trunks_of(plan: Plan) -> list[int]:
    """Tokens of each sequence that another one of its micro-batch computes."""
    trunks = plan.get("trunks") or [0] * len(plan["lengths"])
    require(len(trunks) == len(plan["lengths"]), "has", len(trunks), "trunks")
    return trunks


def homes_of(m: MicroBatch) -> list[list[int]]:
    return m.get("homes") or [m["ranks"]] * len(m["slices"])


def _sharing(m: MicroBatch, degree: int) -> int:
    """Neighbouring ranks of a home that have one set of heads between them."""
    if degree == 1:
        return 1
    return {"all_to_all": degree, "hybrid": m.get("inner", 0)}.get(m.get("engine", ""), 1)


def pieces(start: int, stop: int, degree: int, sharing: int, place: int) -> list[tuple[int, int]]:
    """Tokens of a slice that one place of a home computes: of zig-zag chunks the part that is its own."""
    length, groups = stop - start, degree // sharing
    group, share = divmod(place, sharing)
    edges = [start + k * length // (2 * groups) for k in range(2 * groups + 1)]
    runs = [(edges[group], edges[group + 1]), (edges[-2 - group], edges[-1 - group])]
    total = sum(b - a for a, b in runs)
    first, last, at, mine = share * total // sharing, (share + 1) * total // sharing, 0, []
    for a, b in runs:
        low, high = max(a, a + first - at), min(b, a + last - at)
        if low < high:
            mine.append((low, high))
        at += b - a
    return mine


def tokens_of(m: MicroBatch) -> dict[int, int]:
    """How many tokens each rank computes, padding included."""
    ranks, slices = m["ranks"], m["slices"]
    slots = max(1, len(slices) * m["pad_to"] if m.get("pad_to") else sum(b - a for _, a, b in slices))
    slots += -slots % m.get("round_to", 1)
    if len(ranks) == 1 or m.get("remap") or not m.get("engine"):  # moved until counts are even; padded until they are
        return {rank: (slots + len(ranks) - 1 - place) // len(ranks) for place, rank in enumerate(ranks)}
    counts = dict.fromkeys(ranks, 0)
    for (_, a, b), home in zip(slices, homes_of(m), strict=True):
        for place, rank in enumerate(home):
            counts[rank] += sum(y - x for x, y in pieces(a, b, len(home), _sharing(m, len(home)), place))
    return counts


def _refuse_micro_batch(name: str, m: MicroBatch, lengths: list[int], cut: set[int], facts: Facts) -> None:
    ranks, slices, engine = m["ranks"], m["slices"], m.get("engine", "")
    require(bool(ranks) and len(set(ranks)) == len(ranks), name, "has ranks", ranks)
    require(all(0 <= rank < facts.ranks for rank in ranks), name, "has ranks", ranks)
    require(engine in ENGINES, name, "has engine", engine)
    for i, a, b in slices:
        require(0 <= i < len(lengths) and 0 <= a < b <= lengths[i], name, "has slice", (i, a, b))
    require(len({i for i, _, _ in slices if i in cut}) == sum(i in cut for i, _, _ in slices), name, "two of a chain")
    pad = m.get("pad_to", 0)
    require(not pad or all(b - a <= pad for _, a, b in slices), name, "is padded to less than it holds")
    if facts.padded:
        require(all(b - a == lengths[i] for i, a, b in slices), name, "has a part of a sequence in a row")
        require(bool(pad) or len({b - a for _, a, b in slices}) <= 1, name, "has rows of several lengths")
    if len(ranks) > 1 or m.get("homes"):
        _refuse_homes(name, m, cut, facts)
    tokens = tokens_of(m)
    if slices and len(ranks) == 1 and not pad:
        require(tokens[ranks[0]] % facts.round_tokens == 0, name, "has no multiple of", facts.round_tokens, "tokens")
    require(max(tokens.values()) <= facts.max_tokens, name, "holds", max(tokens.values()), "of", facts.max_tokens)
    require(min(tokens.values()) >= 1, name, "leaves a rank without a token")


def _refuse_homes(name: str, m: MicroBatch, cut: set[int], facts: Facts) -> None:
    engine, inner = m.get("engine", ""), m.get("inner", 0)
    homes = homes_of(m)
    require(len(homes) == len(m["slices"]), name, "has another number of homes than of slices")
    require((engine == "hybrid") == (inner > 0), name, "has inner", inner, "under", engine)
    require(not (engine and m.get("pad_to")), name, "is shared and padded")
    require(engine != "hybrid" or 1 < inner < len(m["ranks"]), name, "has inner", inner)
    for (i, a, b), home in zip(m["slices"], homes, strict=True):
        require(bool(home) and set(home) <= set(m["ranks"]) and len(set(home)) == len(home), name, "has home", home)
        sharing = _sharing(m, len(home))
        require(len(home) % sharing == 0, name, "has", len(home), "ranks in groups of", sharing)
        require(sharing <= facts.heads, name, "has", sharing, "ranks for", facts.heads, "heads")
        if i in cut and engine:
            places = range(len(home))
            kept = all(pieces(a, b, len(home) // sharing, 1, place // sharing) for place in places)
            require(kept, name, "has ranks that attend for nothing of a slice")
    nobody = set(m["ranks"]) - {rank for home in homes for rank in home}
    require(not m["slices"] or m.get("remap") or not nobody, name, "has ranks that are nobody's home", nobody)


def _refuse_trunks(name: str, m: MicroBatch, trunks: list[int], cut: set[int]) -> None:
    """What a sequence leaves to others stands before it: of the slices before it that begin earlier the nearest has
    the last of these tokens, and leaves the rest to one before it in turn."""
    for place, (i, a, _) in enumerate(m["slices"]):
        if not trunks[i]:
            continue
        require(not cut and len(m["ranks"]) == 1 and not m.get("pad_to"), name, "cuts, shares or pads trunks")
        require(a == trunks[i], name, "begins sequence", i, "at", a, "and not after", trunks[i])
        before = [s for s in m["slices"][:place] if s[1] < a]
        require(bool(before) and before[-1][2] >= a, name, "has no trunk of sequence", i)


def _refuse_tokens(name: str, micro_batches: list[MicroBatch], lengths: list[int], trunks: list[int]) -> None:
    """Every token once."""
    held: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for m in micro_batches:
        for i, a, b in m["slices"]:
            held[i].append((a, b))
    for i, length in enumerate(lengths):
        at = trunks[i]
        for a, b in sorted(held[i]):
            require(a == at, name, "of sequence", i, "goes on at", a, "after", at)
            at = b
        require(at == length, name, "of sequence", i, "ends at", at, "of", length)


def _refuse_launches(micro_batches: list[MicroBatch], cut: set[int]) -> None:
    """Slices in their order, each where the keys and values of the earlier ones are."""
    at: dict[int, int] = defaultdict(int)
    before: dict[int, tuple[list[int], int]] = {}
    for number, m in enumerate(micro_batches):
        for (i, a, b), home in zip(m["slices"], homes_of(m), strict=True):
            if i not in cut:
                continue
            require(a == at[i], f"F{number} launches sequence", i, "at", a, "after", at[i])
            now = (list(home), _sharing(m, len(home)))
            if a:
                ring = before[i][1] == now[1] == 1
                kept = set(before[i][0]) <= set(home) if ring else before[i] == now
                require(kept, f"F{number} leaves the prefix of sequence", i)
            at[i], before[i] = b, now


def _refuse_backward(plan: Plan, cut: set[int], facts: Facts) -> None:
    """Groups of its own: on the ranks of the forward, later slices first, and shared ones as they came."""
    count = len(plan["backward"] or plan["micro_batches"])
    replayed = plan["replayed"]
    require(replayed == sorted({j for j in replayed if 0 <= j < count}), "replays", replayed, "of", count)
    if not plan["backward"]:
        return
    require(not plan["recompute"], "layers of other micro-batches are recomputed")
    require(not facts.whole, "the backward has groups of its own")
    home = {i: set(h) for m in plan["micro_batches"] for (i, _, _), h in zip(m["slices"], homes_of(m), strict=True)}
    end = list(plan["lengths"])
    for j, m in enumerate(plan["backward"]):
        require(len(m["ranks"]) == 1 or m in plan["micro_batches"], f"B{j} is shared anew")
        for (i, a, b), own in zip(m["slices"], homes_of(m), strict=True):
            require(set(own) == home[i], f"B{j} leaves the ranks of sequence", i)
            require(b == end[i], f"B{j} launches sequence", i, "up to", b, "before", end[i])
            end[i] = a


def _refuse_rows(plan: Plan, facts: Facts) -> None:
    """Numbers that belong to stages and micro-batches."""
    count, recompute, offload = len(plan["micro_batches"]), plan["recompute"], plan["offload"]
    require(not recompute or [len(row) for row in recompute] == [count] * facts.stages, "recompute of other passes")
    require(all(0 <= n <= facts.layers for row in recompute for n in row), "recomputes layers that are not there")
    require(not offload or len(offload) == count, "offload of other passes")
    require(all(0 <= share <= 1 for share in offload), "offloads more than there is")


Rows = list[list[list[tuple[str, int]]]]
"""Passes (kind, micro-batch) of every stage and rank in their order."""


def _rows(plan: Plan, facts: Facts) -> Rows:
    """The plan's own order, or that of the host: 1F1B over the launch order."""
    forward, backward = plan["micro_batches"], plan["backward"] or plan["micro_batches"]
    if not plan["order"]:
        require(not (_cut(plan) or plan["backward"] or plan["replayed"]), "the host's own order frees what is needed")
        mine = [[i for i, m in enumerate(forward) if rank in m["ranks"]] for rank in range(facts.ranks)]
        return [[list(_one_f_one_b(row, facts.stages - 1 - s)) for row in mine] for s in range(facts.stages)]
    require(len(plan["order"]) == facts.stages, "an order of", len(plan["order"]), "stages")
    for stage, ops in enumerate(plan["order"]):
        counts = Counter((kind, i) for kind, i in ops)
        require(all(n == 1 for n in counts.values()), "stage", stage, "runs a pass twice")
        for kind, row in (("F", forward), ("B", backward)):
            require({i for k, i in counts if k == kind} == set(range(len(row))), "stage", stage, "lacks some", kind)
        weights = {i for k, i in counts if k == "W"}
        require(all(k in "FBW" for k, _ in counts) and weights <= set(range(len(backward))), "no such pass")
        require(not weights or (facts.splits and not facts.in_step), "stage", stage, "splits its backward")
    ranks = {"F": [m["ranks"] for m in forward], "B": [m["ranks"] for m in backward]}
    ranks["W"] = ranks["B"]
    return [
        [[(kind, i) for kind, i in ops if rank in ranks[kind][i]] for rank in range(facts.ranks)]
        for ops in plan["order"]
    ]


def _one_f_one_b(micro_batches: list[int], ahead: int) -> Iterator[tuple[str, int]]:
    for place, i in enumerate(micro_batches):
        yield "F", i
        if place >= ahead:
            yield "B", micro_batches[place - ahead]
    yield from (("B", i) for i in micro_batches[max(0, len(micro_batches) - ahead) :])


def _twins(plan: Plan) -> dict[int, int]:
    """For each backward that is not replayed the forward whose activations it uses."""
    again = set(plan["replayed"])
    if not plan["backward"]:
        return {j: j for j in range(len(plan["micro_batches"])) if j not in again}
    alike: dict[str, deque[int]] = defaultdict(deque)
    for i, m in enumerate(plan["micro_batches"]):
        alike[repr((m["slices"], m["ranks"]))].append(i)
    twins = {}
    for j, m in enumerate(plan["backward"]):
        if j not in again:
            same = alike[repr((m["slices"], m["ranks"]))]
            require(bool(same), f"B{j} equals no forward and is not replayed")
            twins[j] = same.popleft()
    return twins


Turns = dict[tuple[int, int], list[int]]
"""By device and rank the stage of each of its passes."""


def _devices(facts: Facts) -> range:
    return range(facts.stages // 2 if facts.v_shape else facts.stages)


def _turns(plan: Plan, facts: Facts) -> Turns:
    """As the plan merges the lists of a device's stages; a device of one stage is always at that."""
    merge, order = plan.get("merge", []), plan["order"]
    if not facts.v_shape:
        require(not merge, "passes of other devices are merged")
        return {}
    devices = _devices(facts)
    require(len(merge) == len(devices) and bool(order), "a merge of", len(merge), "devices")
    require(not any(len(m["ranks"]) > 1 for m in plan["micro_batches"]), "ranks share what a V runs")
    turns: Turns = {(device, rank): [] for device in devices for rank in range(facts.ranks)}
    for device, row in enumerate(merge):
        wanted = Counter({stage: len(order[stage]) for stage in (device, facts.stages - 1 - device)})
        require(Counter(row) == wanted, "device", device, "does not run what its stages do")
        left = {stage: iter(order[stage]) for stage in wanted}
        for stage in row:
            kind, i = next(left[stage])
            for rank in _members(plan, kind, i):
                turns[device, rank].append(stage)
    return turns


def _refuse_memory(plan: Plan, facts: Facts, device: int, rows: Rows, turns: Turns, twins: Any) -> None:
    """What is kept from forward to backward, at the least."""
    if facts.activation_bytes == float("inf") or any(plan["offload"]):
        return
    kept_by = {i: j for j, i in twins.items()}
    tokens = [tokens_of(m) for m in plan["micro_batches"]]
    for rank in range(facts.ranks):
        held = 0.0
        left = {stage: iter(rows[stage][rank]) for stage in (device, facts.stages - 1 - device)}
        for stage in turns.get((device, rank), [device] * len(rows[device][rank])):
            kind, i = next(left[stage])
            again = plan["recompute"][stage] if plan["recompute"] else [0] * len(tokens)
            number = i if kind == "F" else twins.get(i)
            if kind == "W" or number not in kept_by:
                continue
            whole, rest = facts.layers - again[number], again[number]
            each = tokens[number][rank] * (whole * facts.layer_bytes + rest * facts.input_bytes)
            held += each if kind == "F" else -each
            require(held <= facts.activation_bytes, "rank", rank, "of stage", stage, "holds", held, "bytes")


class _Stage:
    """What the ranks of a stage have in their memory."""

    def __init__(self, plan: Plan, facts: Facts, number: int, twins: dict[int, int]) -> None:
        self._lengths, self._twins, self._number = plan["lengths"], twins, number
        self._forward = plan["micro_batches"]
        self._backward = plan["backward"] or plan["micro_batches"]
        self._first = trunks_of(plan)
        self._written = list(self._first)
        self._unsettled = list(self._lengths)
        self._kept: set[int] = set()
        self._left: set[int] = set()

    def run(self, kind: str, i: int) -> None:
        where = f"{kind}{i} at stage {self._number}"
        if kind == "F":
            for q, a, b in self._forward[i]["slices"]:
                fits = self._written[q] == a and self._unsettled[q] == self._lengths[q]
                require(fits, where, "has not the prefix of sequence", q)
                self._written[q] = b
            self._kept.add(i)
        elif kind == "B":
            if i in self._twins or self._backward is self._forward:
                require(self._twins.get(i, i) in self._kept, where, "comes before its forward")
            for q, a, b in self._backward[i]["slices"]:
                require(self._written[q] == self._lengths[q], where, "comes before a forward of sequence", q)
                require(self._unsettled[q] == b, where, "is not the last of sequence", q, "that is left")
                self._unsettled[q] = a
            self._left.add(i)
        else:
            require(i in self._left, where, "comes before its backward")

    def finish(self) -> None:
        require(self._unsettled == self._first, "stage", self._number, "leaves sequences without gradients")


def _carry_out(plan: Plan, facts: Facts, rows: Rows, turns: Turns, twins: dict[int, int]) -> None:
    """All ranks of all stages walk their lists; a pass waits for its neighbour stage and the ranks that share it."""
    if facts.in_step and facts.ranks > 1:
        _refuse_out_of_step(plan, facts, rows)
    elif facts.together > 1:
        _refuse_groups_out_of_step(plan, facts, rows, twins)
    stages = [_Stage(plan, facts, number, twins) for number in range(facts.stages)]
    lists = [[deque(row) for row in of_stage] for of_stage in rows]
    queues: dict[Any, deque[int]] = defaultdict(deque)
    left = {place: deque(stages) for place, stages in turns.items()}

    def at(stage: int, rank: int) -> deque[int]:
        """The stages of the passes to come, where a device has two."""
        return left.get((min(stage, facts.stages - 1 - stage), rank), deque([stage]))

    moved = True
    while moved:
        moved = False
        for s in range(facts.stages):
            for rank, row in enumerate(lists[s]):
                while row and at(s, rank)[0] == s and (members := _ready(plan, facts, s, lists[s], rank, queues)):
                    op = row[0]
                    at(s, rank).popleft()
                    stages[s].run(*op)
                    _finish(facts, s, lists[s], op, members, queues)
                    moved = True
    waiting = [(s, rank, row[0]) for s, of in enumerate(lists) for rank, row in enumerate(of) if row]
    require(not waiting, "a deadlock: (stage, rank, pass)", waiting[:6])
    for stage in stages:
        stage.finish()


def _members(plan: Plan, kind: str, i: int) -> list[int]:
    ranks: list[int] = ((plan["backward"] or plan["micro_batches"]) if kind != "F" else plan["micro_batches"])[i][
        "ranks"
    ]
    return ranks


def _source(facts: Facts, stage: int, kind: str) -> int | None:
    """The stage whose result a pass waits for."""
    source = {"F": stage - 1, "B": stage + 1}.get(kind, -1)
    return source if 0 <= source < facts.stages else None


def _ready(plan: Plan, facts: Facts, stage: int, lists: Any, rank: int, queues: Any) -> list[int]:
    """The ranks that run a rank's next pass together; none where it has to wait."""
    kind, i = op = lists[rank][0]
    members = _members(plan, kind, i) if kind != "W" else [rank]
    if not all(lists[other] and lists[other][0] == op for other in members):
        return []
    if _source(facts, stage, kind) is not None:
        links = [queues[kind, stage, other] for other in members]
        if not all(links):
            return []
        require(all(link[0] == i for link in links), f"{kind}{i} at stage {stage} takes what another micro-batch sent")
    return members


def _finish(facts: Facts, stage: int, lists: Any, op: tuple[str, int], members: list[int], queues: Any) -> None:
    kind, i = op
    target = {"F": stage + 1, "B": stage - 1}.get(kind, -1)
    for rank in members:
        lists[rank].popleft()
        if _source(facts, stage, kind) is not None:
            queues[kind, stage, rank].popleft()
        if 0 <= target < facts.stages:
            queues[kind, target, rank].append(i)


def _refuse_groups_out_of_step(plan: Plan, facts: Facts, rows: Rows, twins: dict[int, int]) -> None:
    """Ranks that share experts meet in every layer: forward, backward, and where either runs a second time."""
    replayed, size = set(plan["replayed"]), facts.together
    for stage, of_stage in enumerate(rows):
        again = plan["recompute"][stage] if plan["recompute"] else None

        def met(row: list[tuple[str, int]], again: list[int] | None = again) -> list[Any]:
            forwards = [i for kind, i in row if kind == "F"]
            # A backward meets those whom its forward met, unless that runs again right before it.
            return [
                kind if kind == "F" else (i in replayed or forwards.index(twins[i]), again and again[i])
                for kind, i in row
                if kind != "W"
            ]

        for first in range(0, facts.ranks, size):
            seen = [met(row) for row in of_stage[first : first + size]]
            for rank, other in enumerate(seen, first):
                require(other == seen[0], "stage", stage, "ranks", first, rank, "meet in unlike passes")


def _refuse_out_of_step(plan: Plan, facts: Facts, rows: Rows) -> None:
    """All ranks gather weights in every pass: the k-th pass of each must be of one kind, and a shared one the same."""
    require(facts.stages == 1, "ranks in step have stages")
    patterns = {"".join(kind for kind, _ in row) for row in rows[0]}
    require(len(patterns) == 1, "ranks in step run unlike passes", *sorted(patterns)[:2])
    places = [{op: place for place, op in enumerate(row)} for row in rows[0]]
    for row in rows[0]:
        for op in row:
            met = {places[rank][op] for rank in _members(plan, *op)}
            require(len(met) == 1, "ranks in step meet at unlike places", op)
