"""Planted faults, and what must notice them.

Each is a fault that a person could make: one piece of the code replaced by another, wrong one. The killer is a command
that must fail where the fault is planted, and pass where it is not: a run of tests, or a proof of a small recipe.
``fault = of(file, killer)`` says where the faults below it stand and who notices them, ``fault(name, old, new)`` what
each replaces. `old` stands once in the file, so a fault whose place has changed is an error and no silent pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Killer(NamedTuple):
    """``evenload verify`` or ``pytest`` with these words; `k` and `m` are expressions that select tests."""

    verb: str
    words: tuple[str, ...]
    k: str = ""
    m: str = ""

    def __str__(self) -> str:
        return " ".join([*self.words, *(["-k", self.k] if self.k else []), *(["-m", self.m] if self.m else [])])


class Mutant(NamedTuple):
    """A planted fault."""

    name: str
    file: str
    old: str
    new: str
    killer: Killer


MUTANTS: list[Mutant] = []


def of(file: str, killer: Killer) -> Callable[[str, str, str], None]:
    """What plants faults in a file that a killer notices."""
    return lambda name, old, new: MUTANTS.append(Mutant(name, file, old, new, killer))


def cases(*places: str, k: str = "", m: str = "") -> Killer:
    return Killer("pytest", tuple(f"tests/{place}" for place in places), k, m)


def compared(run: str) -> Killer:
    """One of the short trainings that are compared with plain ones."""
    return cases(f"training/proof/test_compare.py::test_a_small_run_is_exact[{run}]")


def verify(recipe: str, *words: str, layers: int = 2) -> Killer:
    small = ("model.hidden_size=32", "model.num_attention_heads=4", "model.num_query_groups=2", "data.max_length=512")
    sizes = (f"model.num_layers={layers}", *small, "train.global_batch_size=8")
    return Killer("verify", (f"recipes/{recipe}.yaml", *sizes, *words))


EXACT = "train.dtype=fp64"

killer = verify("slices", EXACT, "plugins.packing.max_tokens=128")
fault = of("runtime/attention/prefix.py", killer)
fault(
    "dK of earlier slices is dropped",
    "[: piece.stop].add_(dk_PNGD)",
    "[piece.start : piece.stop].add_(dk_PNGD[piece.start :])",
)
fault = of("runtime/attention/pack.py", killer)
fault("positions of late slices are one off", "start, piece.stop)", "start, piece.stop) + (piece.start > 0)")
fault(
    "the label at the border of a slice is lost",
    "labels_of(piece.sequence)[piece.start + 1 : piece.stop + 1]",
    "labels_of(piece.sequence)[piece.start + 1 : piece.stop + (len(slices) > 1)]",
)
fault = of("runtime/attention/sharing/running_job.py", killer)
fault(
    "the backward's scale is off where a pack has one slice",
    "dq,",
    "inputs = inputs._replace(scale=inputs.scale * (1.0 if len(self.job.parts) > 1 else 1.001))\n            dq,",
)
killer = verify("slices", "train.dtype=bf16", "plugins.packing.max_tokens=128")
fault = of("runtime/attention/sharing/attention.py", killer)
fault(
    "attention's scale is two per cent off in bfloat16",
    "scores.sinks_H",
    "scores.sinks_H\n"
    "    if q_THD.dtype == torch.bfloat16:\n"
    "        scores = scores._replace(scale=scores.scale * 1.02)",
)
fault = of("training/job.py", verify("quickstart", EXACT, "plugins.packing.max_tokens=1024", "--steps", "8"))
fault(
    "rank 1 reads wrong tokens later in the run",
    "return lambda index: self.source.tokens(int(draw.samples[index]))",
    'late = self.world.rank == 1 and draw.state.get("consumed", 0) > 4 * len(draw.samples)\n'
    "        return lambda index: self.source.tokens(int(draw.samples[index]))[:: -1 if late else 1].copy()",
)
fault = of("runtime/stage/deferred.py", verify("pipeline", EXACT, layers=4))
fault(
    "the last of many weight gradients is skipped",
    "roots =",
    "del left[len(left) - (len(left) > 3) :]\n            roots =",
)
fault = of("runtime/stage/deferred.py", verify("pipeline", EXACT, "model.family=gpt", layers=4))
fault("a weight pass leaves a token out of a bias", "(-1, dy.shape[-1]).sum(0) if", "(-1, dy.shape[-1])[1:].sum(0) if")
fault = of("integrations/megatron/model/linears.py", verify("pipeline", EXACT, "parallel.tp=2", layers=4))
fault("a weight pass forgets the sum over tensor-parallel ranks", 'how["tp_group"] if how["allreduce_dgrad"] else ', "")
fault = of("integrations/megatron/reduction.py", verify("pipeline", EXACT))
fault(
    "norms of the first stage get half their gradient",
    "(1.0 / self.divisor)",
    "(1.0 / self.divisor)\n"
    "            for p in self._ddp.parameters() if self.local_loss == 0.0 else ():\n"
    "                p.main_grad.mul_(0.5 if p.dim() == 1 else 1.0)",
)
killer = verify("mesh", EXACT, "plugins.mesh.max_tokens=160")
fault = of("runtime/attention/sharing/ring.py", killer)
fault("a ring loses dK and dV after two hops", "grads += going()", "grads += going() * (hop < 2)")
fault = of("runtime/attention/sharing/gather.py", killer)
fault(
    "a share of gathered gradients is a per mille off",
    "group: shares[group] for group",
    "g: shares[g] * (1 if g else 0.999) for g",
)
killer = verify(
    "mesh", EXACT, "model.num_query_groups=1", "plugins.mesh.max_tokens=160", "plugins.mesh.engines=all_to_all"
)
fault = of("runtime/attention/sharing/relayout.py", killer)
fault("gradients of a shared key head overwrite each other", "+= next(values)", "= next(values)")
killer = verify(
    "mesh",
    EXACT,
    "parallel.dp=3",
    "model.num_attention_heads=8",
    "plugins.mesh.max_tokens=200",
    "plugins.mesh.engines=all_to_all",
)
fault = of("runtime/attention/sharing/jobs.py", killer)
fault("gradients of query heads are not summed over their key head", "dim).index_add_(1,", "dim).index_copy_(1,")
killer = verify("deepspeed", "plugins.packing.max_tokens=256", "deepspeed.zero_stage=3")
fault = of("runtime/attention/pack.py", killer)
fault("a dummy counts in the loss", "segments[-1], IGNORE, dtype=np", "segments[-1], IGNORE if slices else 0, dtype=np")
fault = of("integrations/deepspeed/engine/host.py", killer)
fault("ZeRO 3 divides gradients by the ranks once more", "host.world.size if host.stage == 3 else 1", "1")
killer = verify(
    "deepspeed",
    "plugins.packing.max_tokens=1024",
    "deepspeed.zero_stage=0",
    "parallel.ep=2",
    "model.family=mixtral",
    "model.moe.num_experts=4",
)
fault = of("integrations/deepspeed/engine/experts.py", killer)
fault("the norm of experts is each rank's own", "dist.all_reduce(of_experts, group=self.group)", "pass")
fault("the experts of a rank are taken for those of another", "torch.cat(parts).cpu()", "torch.cat(parts[::-1]).cpu()")
fault = of("integrations/deepspeed/engine/host.py", killer)
fault("gradients are clipped by the mean of the ranks' norms", "self.engine.clip_fp32_gradients = self._clip", "pass")

fault = of("pyproject.toml", cases("test_imports.py", k="package"))
fault("an installation has not every package that its commands import", '    "xxhash>=3.4",\n', "")

fault = of("commands/env.py", cases("commands/test_env.py", m="not slow"))
fault(
    "Ray's workers lose what a script has on their PYTHONPATH",
    'variables.get("PYTHONPATH", "${PYTHONPATH}")',
    '"${PYTHONPATH}"',
)
fault = of("integrations/megatron/model/expert_gate.py", cases("commands/test_exchange_faults.py"))
fault("tokens move before headers were looked at", 'if point == "before_ep_alltoall":', "if point is None:")
fault = of("integrations/huggingface/folders/writing.py", cases("commands/test_export.py", k="leaves and megatron"))
fault("an export has its name before every rank has given its part", "self._confirm()", "pass")
killer = cases("commands/test_train.py", k="in_the_background")
fault = of("integrations/megatron/saving/storage.py", killer)
fault("what is written in the background changes under the writer", '().to("cpu", copy=True)', '().to("cpu")')
fault = of("training/checkpoint/resuming.py", killer)
fault("a failure in the background is forgotten with the next checkpoint", '""\n        self.wait()', '""')
killer = cases("commands/test_train.py", k="other_samples or other_weights")
fault = of("training/job.py", killer)
fault("ranks compare of data how long it is", "fingerprint.encode(), digest_size=", "lengths.tobytes(), digest_size=")
fault = of("integrations/huggingface/folders/reading.py", killer)
fault(
    "a folder of weights is known by its names", "digest.update(opened.read(_BLOCK_BYTES))", "opened.read(_BLOCK_BYTES)"
)
fault = of("training/proof/steps.py", cases("commands/test_verify.py", k="planners_that_failed"))
fault("a proof forgets that planners failed", "or self.over or self.failed", "or self.over")

fault = of("core/policies.py", cases("core/test_policies.py"))
fault(
    "an objective counts targets and not domains",
    "np.divide(parts, sums, out=np.zeros(len(sums)), where=there)",
    "parts",
)
fault("domains that are not in a batch take their part of its loss", "(parts) if parts.any", "(objective) if parts.any")

fault = of("core/balance/step_bound.py", cases("core/balance/test_step_bound.py", k="drawn or few"))
fault("tensor-parallel traffic is in a bound twice", "(1.0 + more) + token_s", "(1.0 + more) + 2 * token_s")
fault("a way in is in a bound twice", "in_s += forward.launch_s + hop_s", "in_s += 2 * (forward.launch_s + hop_s)")
fault("a bound has more head than the model", "num_stages)", "num_stages) + context.head_frac * (stage > 0)")
fault("keys and values take room twice in a bound", "- memory.kv_bytes_per_token", "- 2 * memory.kv_bytes_per_token")
fault("a hand-over between stages is in a bound twice", "token_s = min", "token_s = 2 * min")
fault(
    "other work fills less of the way of a large micro-batch in a bound than it can",
    "idle[:, None] + filled_s",
    "0.9 * (idle[:, None] + filled_s)",
)
fault("a last stage runs forwards in a bound that it may skip", "costs.recompute and has_last", "False and has_last")

fault = of("core/costs/busy.py", cases("core/costs/test_busy.py"))
fault("a busy machine is never marked", "> max(self.used, self.cores) + MARGIN or self.spread > SPREAD", "< 0")
killer = cases("core/costs/test_by_setting.py")
fault = of("core/costs/by_setting.py", killer)
fault("a degree that was not measured costs what its neighbour does", "0, first + place * (second - first)", "0, first")
fault("ZeRO 3 takes what whole weights do where both were measured", "if sharding in costs.by_sharding:", "if False:")
fault("ranks hold the states of the sharding that was measured", "holding(**state_bytes).model_copy", "model_copy")
fault = of("core/costs/costs.py", killer)
fault("a frozen base has weight gradients at the degrees beside its own", "(self), **others, ", "(self), ")
fault = of("core/costs/kept_values.py", cases("core/costs/test_tensor_parallel.py"))
fault("tensor-parallel ranks are said to divide what norms keep", "part if divides_tokens else 1.0,", "part,")

fault = of("core/experts/exact.py", cases("core/experts/test_exact.py"))
fault("a quota of a copy is off by one", "(starts_R + tokens_R)[:, None]", "(starts_R + tokens_R - 1)[:, None]")
fault("a giver that is overdrawn takes from nobody", "taken_R[givers_R] += overdrawn_R", "pass")
fault("a share is the mean rounded down", "(-(-total // num_ranks), tolerated)", "(total // num_ranks, tolerated)")
fault = of("core/experts/messages.py", cases("core/experts/test_messages.py"))
fault("ranks that have pieces of an expert send those of others", "rank, other, expert,", "other, rank, expert,")
fault = of("core/experts/quotas.py", cases("core/experts/test_quotas.py"))
fault("the law of quotas lets a rank compute less than nothing", "or (quotas_ER < 0).any():", ":")
fault("the law of quotas lets tokens be repeated", "(wanted_E != served_E)", "(wanted_E > served_E)")
fault("the law of quotas lets a rank have a copy beyond its slots", "policy.slots:", "policy.slots + 1:")
fault("the law of quotas does not ask whose copies they are", "- set(copies[rank])", "- set().union(*copies)")
fault = of("core/experts/seconds.py", cases("core/experts/test_seconds.py"))
fault("a layer counts a row for each expert, though tokens go once to a node", "size < num_ranks:", "size > num_ranks:")
fault("a token that goes elsewhere saves two journeys and not four", "+ 4 * cost.token_bytes", "+ 2 * cost.token_bytes")
fault("copies that are let go travel once", "(cost.weight_bytes) * (1 if cost.keep else 2)", "(cost.weight_bytes)")
fault = of("core/experts/sources.py", cases("core/experts/test_sources.py"))
fault("nodes of receivers are not those of senders", "counts_RE.T[divided], node_ranks", "counts_RE.T[divided], 0")
fault(
    "senders and receivers of an expert's tokens are swapped",
    "quotas_ER[divided], counts_RE.T",
    "counts_RE.T[divided], quotas_ER",
)

fault = of("core/input/reading.py", cases("core/input/test_reading.py"))
fault("a parser's own errors come through", "(text))\n    except Exception as", "(text))\n    except yaml.YAMLError as")
fault("who changes a document changes it for the next reader", "deepcopy(_document(text))", "_document(text)")
fault = of("core/input/sandbox.py", cases("core/input/test_sandbox.py"))
fault("each question to the sandbox has all the seconds", 'budget.left_s -= answer["seconds"]', "pass")
fault("the sandbox has memory without end", "_limit_memory()\n        begin_s", "begin_s")

fault = of("core/plan/program.py", cases("core/plan/test_rounds.py"))
fault("one rank of a group skips a forward that its peers run", "any(runs[i] is not None", "all(runs[i] is not None")
fault("backwards of a group may belong to forwards of several rounds", "of pass {number}", "of pass {number * 0}")

fault = of("core/planning/chain.py", cases("core/planning/test_chain.py", "independent"))
fault(
    "a plan over the caps is trained",
    "self.under_caps(plan.revised(notes=(*plan.notes, *notes)) if notes else plan)",
    "plan.revised(notes=(*plan.notes, *notes)) if notes else plan",
)
fault = of("core/planning/exercised.py", cases("core/planning/test_exercised.py"))
fault("a plan that took over shows its plugin at work", "not (fell_back and isinstance(plugin, StepPlugin)) and ", "")
fault("a plan shows a plugin that was left out of it", " and not refused_by(plan, plugin.name)", "")
fault = of("core/planning/gains.py", cases("core/planning/test_gains.py"))
fault("a step that pads or waits is taken for as good as its plan", "if stock_s <= (1 + NOTHING) *", "if stock_s >=")
fault = of("core/planning/judge.py", cases("core/planning/test_judge.py"))
fault("a baseline that may win is taken for one that cannot", "return 0.0", "return math.inf")
fault("a candidate gives way to one that no device holds", "for one in candidates if one.fits", "for one in candidates")
fault = of("core/planning/parts.py", cases("core/planning/test_parts.py"))
fault("one part of a plane has the work of all", "cuts, number * self.ranks", "cuts, 0 * self.ranks")
fault("slices of a shorter sequence begin anywhere", "at * own // whole // block * block for", "at * own // whole for")
fault = of("core/planning/planner.py", cases("core/planning/test_planner.py"))
fault("one rank's other plan is no matter", "if odd:", "if len(odd) > 1:")
fault("a rank takes its own stage", "best = stages.at(_least(answers))", "best = stages.at(stages.reached)")
fault(
    "a stage's plan is not compared",
    "_refuse_divergence(self._exchange(_digest(plan, begun.draw)), self.step)",
    "self._exchange(plan.digest)",
)
fault("a late planner goes on", "begun.over.set()\n        # All ranks", "# All ranks")
fault = of("core/planning/planner.py", cases("core/planning/test_planner.py", k="other_weights"))
fault("ranks do not compare their weights", "return plan.digest if sums is None", "return plan.digest if plan")
fault("ranks do not compare the divisors of their losses", "repr(draw.divisor).encode()", 'b""')
fault = of("core/planning/stages.py", cases("core/planning/test_stages.py"))
fault("a stage takes the slower plan", "candidate.fits, candidate.step_s) < (", "candidate.fits, candidate.step_s) > (")
fault("a stage breaks the settings of a later plugin", "None if self.chain.breaks(plan) else judge(", "judge(")
killer = cases("core/planning/test_turns.py")
fault = of("core/planning/planner.py", killer)
fault("a rank makes two plans at a time", "before.over.wait()", "pass")
fault("the data's state is that of the last draw", ", draw,", ", self._ahead[-1].draw if self._ahead else draw,")
fault("more is drawn than there is", "min(self._steps_ahead, follow)", "self._steps_ahead")
fault("what was received is not compared", "_refuse_divergence([answer[2:] for answer in answers], self.step)", "pass")
fault("every rank plans every step", "is not None and not turns.is_own(number):", "is not None and turns.is_own(-1):")
fault = of("core/planning/turns.py", killer)
fault("a plan of an earlier step is taken", "(default_factory=dict)", "(default_factory=lambda plans={}: plans)")
fault("a later stage's plan is not sent", "not None and best is not self._last:", "not None and self._last is None:")
fault("a plan that was received may run code", "_DATA:", "_DATA:\n            return super().find_class(module, name)")

fault = of("core/recipe/adapter.py", cases("core/recipe/test_adapter.py"))
fault("the last pattern of names counts, and not the first", "pattern in patterns", "pattern in reversed(patterns)")

fault = of("core/planning/floors.py", cases("core/planning/test_floors.py"))
fault("a floor of a setting is 20 % too high", "_plugins_s(chain, batch) if", "1.2 * _plugins_s(chain, batch) if")
killer = cases("plugins/search/test_search.py", k="dense or little or moment")
fault = of("core/planning/floors.py", killer)
fault("a floor of a search is 20 % too high", "passes_s + after_passes_s", "1.2 * passes_s + after_passes_s")
fault = of("plugins/search/best_first.py", killer)
fault(
    "a search ends at the first setting that is planned whole",
    "planned:\n            yield search",
    "planned:\n            yield search\n        if one.whole:\n            return",
)
fault("a search plans what no device holds", "fits = lacking_bytes <= 0", "fits = lacking_bytes <= 1e18")
killer = cases("plugins/search/test_search.py", k="overlap")
fault = of("core/planning/floors.py", killer)
fault(
    "a gradient sum that no plan overlaps counts as overlapped",
    "if batch.max(initial=0) > caps.max_tokens:\n        return math.inf",
    "pass",
)
fault = of("plugins/search/best_first.py", killer)
fault(
    "plans are reused where the trainer's own schedule may be faster",
    "not step.plan.in_host_schedule and step.step_s <= in_schedule_s(chain, batch.lengths)",
    "True",
)
fault = of("core/planning/stage_layers.py", cases("core/planning/test_stage_layers.py"))
fault("auto stays with its first numbers", "for _ in range(MOVES):", "for _ in range(0):")

killer = cases("core/simulate/test_unequal_stages.py")
fault = of("core/costs/context.py", killer)
fault("a stage has the seconds of its neighbour's layers", "for own in layers", "for own in (*layers[1:], layers[0])")
fault("the output layer grows with the layers beside it", "/ share_of(self.layout.layers, stage) - 1", "- 1")
fault = of("core/plan/limits.py", killer)
fault("every stage has the memory of the mean one", "self.memory.of_share(share_of(self.layers, stage))", "self.memory")
killer = cases("core/simulate/test_v_shape.py")
fault = of("core/costs/memory.py", killer)
fault("a device of two stages holds one of them", "levels.append(level + other.held_bytes)", "levels.append(level)")
fault = of("core/simulate/events.py", killer)
fault(
    "the stages of a device run at once",
    "max(free[device][r] for members in together.values() for r in members)",
    "0.0",
)
fault(
    "the stages of a device have links of their own", "[to - device]", ".setdefault((stage, ahead), [0.0] * num_ranks)"
)
fault = of("core/laws.py", killer)
fault("a merge that leaves passes out passes the laws", "if sorted(row) != wanted:", "if False:")

fault = of("data/cache.py", cases("data/test_cache.py"))
fault(
    "without locks a writer takes away what another writes",
    "if _acquire(lock.fileno(), path):\n            _clear",
    "_acquire(lock.fileno(), path)\n        _clear",
)
fault("what a killed writer has left stays", "_clear(path)", "pass")
killer = cases("data/test_content.py")
fault = of("data/content.py", killer)
fault("only the lengths of data count", 'update(np.asarray(one[begin:end]).astype("<i8").tobytes())', 'update(b"")')
fault("labels of data do not count", "for one in columns:", "for one in columns[:1]:")
fault("other lengths of an earlier version go on", 'and now.startswith(f"{kept}-"):', "and now:")
fault("the first sample comes before the first look", '"first" in vars(self) and self._content()', "self._content()")
fault = of("data/sources.py", killer)
fault("a file that changes under a run is not looked at", "self._watch.look()", "pass")
killer = cases(
    "data/test_mixture.py", "data/test_mixed.py", "training/test_mixed_drawing.py", "training/test_domain_losses.py"
)
fault = of("data/samples/mixture.py", killer)
fault("a domain's order is that of every other one", 'f"{seed}/{name}"', 'f"{seed}"')
fault("what is due to a domain is forgotten behind a step", "credits=tuple(credits),", "credits=(0.0,) * len(credits),")
fault("a sample of a mixture pays 1 whatever its targets", "credits[domain] -= price", "credits[domain] -= 1")
fault("a domain of share 0 is drawn from as any other", "shared, key=due.", "range(len(due)), key=due.")
fault("a domain begins the same epoch again", "self._begun.epoch + epochs, consumed", "self._begun.epoch, consumed")
fault("a domain that leaves begins anew when it is back", "credits, step, override, absent", "credits, step, override")
fault("a mixture goes on with the shares of its first step", "credits, step, override,", "credits, 0, override,")
fault("a group of a domain is paid for as a sample", "price = len(samples) if prices is", "price = 1 if prices is")
fault = of("data/samples/numbering.py", killer)
fault("the first sample of a domain is one of its neighbour's", 'side="right"', 'side="left"')
fault = of("training/drawing.py", killer)
fault("what waits of a domain that leaves is lost", "strict=True), *waiting.absent]", "strict=True)]")
fault("a sample has the weight of the batch's last domain", "(self.weights)[places]", "(self.weights)[places[::-1]]")
fault = of("core/policies.py", killer)
fault("a domain's loss holds its neighbours'", "domain == place for place in", "domain >= place for place in")
fault("a domain's loss grows with its weight", "if weights is not None:", "if weights is None:")
fault = of("data/samples/order.py", cases("data/test_order.py"))
fault("every epoch has the order of the first", "num_samples, self.seed, self.epoch", "num_samples, self.seed, 0")
fault = of("plugins/data/reference.py", cases("plugins/data/test_reference.py"))
fault("losses of a domain stand where those of the first one do", "self._starts[part]", "self._starts[0]")
fault("a score removes files of others", "path.is_file() and not path.is_symlink()", "True")
fault = of("data/samples/sampler.py", cases("data/test_sampler.py"))
fault("every rank of a sampler draws the same", "[self.rank :: self.num_ranks]", "[: len(numbers) // self.num_ranks]")
fault("a sampler's state is behind what loaders have drawn", "self._kept[place - first]", "self._kept[-1]")
fault("a sampler goes on by the shares of its constructor", "if same and points else", "if same and not points else")
fault("changes of shares to come are not kept", "self._points[now:]", "self._points[now : now + 1]")
fault("a sampler's numbers are those of domains by name", "samples - own.firsts[places] + firsts[places]", "samples")

fault = of("data/rows/chats.py", cases("data/rows/test_rows.py", k="brings"))
fault("a row replaces the template of its tokenizer", "sorted(settings.keys() & self._own):", "[]:")
killer = cases("data/rows/test_turns.py", k="by_hand or said_once or renders_nothing")
fault = of("data/rows/chats.py", killer)
fault("a template without an end mark teaches none", "(start, stop + 1) for", "(start, stop) for")
fault("a chat's last answer has no end mark", "text += mark if", 'text += "" if')
fault("what a template drops is said of each row", "self._warned = True", "pass")
fault = of("data/rows/turns.py", killer)
fault("a copy that says something else tells the turns", "if marked == text and", "if")
fault("turns are those of the last loop around messages", "max(chats, key=_Chat.num_whole)", "chats[0]")
fault("a loop that renders nothing tells the turns", "if chat.renders()]", "]")
fault("a loop that renders nothing tells the last answer", "[*self.begins][:-1])", "self.begins)")
fault("what asks for an answer is a target", "begin + self._shared(self._asked(number), turn)", "begin")
fault("a character that the prompt has too is no target", "len(one) else max(", "len(one) or alike else max(")
fault(
    "results of tools inside an answer are targets", "[(start, begin + first), (stop - rest, stop)]", "[(start, stop)]"
)
fault("what an answer says after results of tools is none", "rest = len(alone) - first if", "rest = 0 if")
fault("a block takes no line's end away after a mark", "{{% if 0 %}}{{% endif {loop[2]}%}}", "")
fault = of("data/rows/chats.py", cases("data/rows/test_turns.py", k="deepseek_drops"))
dropped = "{% set content = content.split('</think>')[-1] %}"
fault("thoughts of DeepSeek's answers are left out", '{% endif %}", ""),', f'{{% endif %}}", "{dropped}"),')
fault("a call of DeepSeek needs content", "if not message['content'] %}", "if message['content'] is none %}")
fault("arguments of DeepSeek's calls are text alone", "is string else", "is defined else")
fault = of("data/rows/readers.py", cases("data/rows/test_rows.py", k="json_of_datasets or at_every_depth"))
fault("an object of a Json column is text", 'reading.parse_json(value, f"a value of {name}", _DO)', "value")
fault("messages that are Json are no messages", " or _is_json(column.value_type) else", " else")
fault("fields that arrow adds are said to be null", " if row[field] is not None}", "}")
killer = cases("data/rows/test_weights.py")
fault = of("data/formats.py", killer)
fault("tokens of weight 0 stay targets", "documents.weights.nonzero(spans)", "spans")
fault = of("data/sources.py", killer)
fault("a piece of a long row has the weights of its beginning", " + self._cut.start[index]", "")

killer = cases("hosts/test_equal.py", k="anew")
fault = of("patches/transformers.py", killer)
fault("what a program assigns anew stays", "for lost in put_back(steps):", "for lost in list[str]():")
fault = of("integrations/transformers/trainer.py", killer)
fault("a wrapper inside a wrapper begins a step of its own", "if is_running():  # inside", "if not trainer:  # inside")
fault = of("integrations/transformers/conditions.py", cases("hosts/test_trl_layouts.py"))
fault("weights are moved in a copy that is freed", "_reshard(model)  # else what", "pass  # else what")
fault = of(
    "integrations/transformers/conditions.py", cases("integrations/huggingface/test_trainer.py", k="exact and fsdp")
)
fault("a step runs on a copy of moved weights", "_reshard(model)  # else the next", "pass  # else the next")

fault = of("core/simulate/one_queue.py", cases("independent/test_one_queue.py"))
fault(
    "a second send does not wait until the first is taken", "max(starts[stage, op] + 1, taken)", "starts[stage, op] + 1"
)

fault = of("integrations/unmodified/planned_loop.py", cases("integrations/test_planned_loop.py"))
fault("equal batches keep the plan of other costs", "_last and self._last[0] is self.chain and ", "_last and ")
fault(
    "batches keep the plan of other lengths",
    "np.array_equal(self._last[1].lengths, lengths)",
    "len(self._last[1].lengths) == len(lengths)",
)
fault("loops compare no digests of plans", "_NO_PLAN if refusal else plan.digest,", "_NO_PLAN,")
fault("loops number every step the first", "self.steps += 1", "self.steps = 1")
fault("a batch that one rank refuses is planned on the others", "next(filter(None, everyone(refusal)),", "(refusal or")
fault = of("integrations/unmodified/roll_call.py", cases("integrations/test_roll_call.py"))
fault("ranks without evenload are not asked after", "before_first = partial(_await_all, word)", "before_first = None")
fault("ranks with other plugins pass for ranks with the same", "if set(words) != {word}:", "if None in words:")

killer = cases(
    "integrations/deepspeed/test_experts.py",
    k="divided_experts_are and zero1 or loop_of_others and 2-4-None or change_no_count",
)
fault = of("runtime/experts/owners.py", killer)
fault(
    "the gradient of a copy does not come home",
    "of_index.get(index, [None] * len(self.shapes))",
    "[None] * len(self.shapes)",
)
fault = of("runtime/experts/balance.py", killer)
fault("copies stand in each other's slots", "slots + np.arange(len(experts))", "slots + np.arange(len(experts))[::-1]")
fault("tokens go to slots of other experts", "().argsort(stable=True)", "().argsort(stable=True, descending=True)")
fault = of("integrations/deepspeed/engine/expert_gate.py", killer)
fault("AutoEP's loads count slots for experts", "layer.tokens_per_expert.add_(counts_E)", "pass")
fault("ranks with copies reduce the gradients of experts in another order than ranks without", 'w3", "w2', 'w2", "w3')
killer = cases("integrations/deepspeed/test_tenants.py", k="begins_with_its_replay")
fault = of("integrations/deepspeed/engine/frozen.py", killer)
fault("a recomputed layer of ZeRO 3 is replayed when an adapter asks for it", "_marked, layer.", "layer.")
fault = of("integrations/deepspeed/engine/frozen.py", cases("integrations/deepspeed/test_tenants.py", k="in_a_row"))
fault("backwards in a row keep the frozen weights that they gathered", "self._releases.before_backward()", "pass")
killer = cases("integrations/deepspeed/test_tenants.py", k="three_steps and zero3")
fault = of("integrations/deepspeed/engine/frozen.py", killer)
fault(
    "a pack of no tenant has no backward beside a frozen model",
    "output.requires_grad_() if torch.is_grad_enabled() else output",
    "output",
)
killer = cases("integrations/deepspeed/test_tenants.py::test_pipelines_train_each_tenant_as_if_alone", k="4-False")
fault = of("integrations/deepspeed/pipeline/host.py", killer)
fault("adapters of a stage are summed over the stages", "grid.get_data_parallel_group", "grid.get_pipe_parallel_group")

killer = cases("integrations/deepspeed/pipeline/test_pipeline.py", k="as_many_as_are_said")
fault = of("integrations/deepspeed/pipeline/model.py", killer)
fault("DeepSpeed gives a stage its neighbour's layers", "accumulate(each[:-1])", "accumulate(each[1:])")

fault = of("integrations/deepspeed/unmodified/loader.py", cases("integrations/deepspeed/unmodified/test_loader.py"))
fault("a planned loader draws all steps before the first", "self.stock.data_sampler", "list(self.stock.data_sampler)")
fault("a planned loader draws no further than its first step", "not stock_batches[-1]:", "not stock_batches[0] or _:")
fault = of("integrations/unmodified/exact_number.py", cases("integrations/test_exact_number.py"))
fault("a user's step is filled up with dummies", "while len(result) < count and", "while len(result) < 1 and")
fault("ranks in step run real micro-batches though they are slower", "dummies if slower else real", "real")
killer = cases("integrations/deepspeed/unmodified/test_promises.py")
fault = of("integrations/deepspeed/unmodified/loader.py", killer)
fault(
    "samples are collated one by one, so that padding is not seen",
    "in stock_batches",
    "in [[row] for rows in stock_batches for row in rows]",
)
fault("the shortest sample is measured against a window", "longest,", "min(entry.length for entry in entries),")
fault(
    "a sample that reads otherwise on another rank is taken",
    "SampleEntry.of(entry.rows, entry.place, samples[entry.place]) != entry",
    "len(samples[entry.place].tokens) != entry.length",
)
fault = of("integrations/deepspeed/unmodified/micro_batches.py", killer)
fault("a dummy weighs a target", "_: np.zeros(2, dtype=np.int64)), 0", "_: np.zeros(2, dtype=np.int64)), 1")
fault = of("integrations/deepspeed/unmodified/loop.py", killer)
fault("dummies show a loss of their own", "elif state.weight:", "elif False:")
killer = cases(
    "integrations/deepspeed/unmodified/test_script.py::test_activation_checkpointing_changes_nothing_and_a_monitor_gets_the_numbers"
)
fault = of("integrations/deepspeed/unmodified/loop.py", killer)
fault("a monitor has evenload's numbers under the step before", " + engine.train_batch_size()", "")

killer = cases("integrations/huggingface/test_accelerate.py", k="filled_up")
fault = of("integrations/unmodified/exact_number.py", killer)
fault("the packs of a loop of Accelerate are not filled up", "m._replace(pad_to=0)", "m._replace(pad_to=0, round_to=0)")
killer = cases("integrations/huggingface/test_accelerate.py", k="that_are_planned")
fault = of("integrations/transformers/planning.py", killer)
fault("a loop of Accelerate takes the mean of a pack", "self.divisors", "[pack.num_targets] * len(self.divisors)")
fault(
    "a loop's own number of tokens does not divide",
    "(num_targets, samples)) if divisor is None else float(divisor)",
    "(num_targets, samples))",
)
killer = cases("integrations/huggingface/test_accelerate.py", k="stay or is_refused")
fault = of("integrations/transformers/accelerate_loop.py", killer)
fault("a loop is planned before its second backward", "loop.watched |= bool(seen)", "loop.loss.strayed = None")
fault = of("integrations/transformers/pack_loss.py", killer)
fault("any loss passes for the model's own in a loop", "bool(used) and abs(value - own) > rounding", "False")
fault("ranks of a loop may multiply by different numbers", "bool(unlike),", "False,")
fault("a loop reads logits of a pack for those of its rows", "output[key] = OfPack()", "pass")
killer = cases("integrations/huggingface/test_adapters.py")
fault = of("integrations/huggingface/folders/adapters.py", killer)
fault("a tensor of infinities is a finite one", "(torch.isfinite(tensor).all())", "(torch.isfinite(tensor).any())")
fault(
    "another config comes to stand beside the tensors that are there",
    "(folder / ADAPTER_MODEL).unlink(missing_ok=True)",
    "pass",
)
fault("of an adapter of another base the first halves alone are compared", "if size !=", "if is_first and size !=")
fault(
    "a layer that the config of an adapter leaves out is read all the same",
    "not in set(adapter.targets(layers))",
    "in ()",
)
fault = of("integrations/huggingface/folders/adapter_config.py", killer)
fault("a setting of an adapter that nobody knows is passed over", "if fields[key]:", "if key in _CHOICES:")
fault(
    "an adapter is written with the alpha of its rank's default",
    "alpha_pattern={key: _whole(alpha) for key, alpha in adapter.alpha_pattern.items()},",
    "",
)
killer = cases("integrations/huggingface/test_audit.py", k="shifted or mean or positions")
fault = of("plugins/audit/audit.py", killer)
fault("an audit misses one shifted label", "in judged if offset is not None", "in judged if offset not in (None, 1)")
fault(
    "an audit takes a mean of means for right", '/ usual["count', '* one["targets"] / usual["count"] / usual["targets'
)
fault("an audit runs a sample alone at the positions of its row", "(one, span)\n", "(one, span, positions_L)\n")
killer = cases("integrations/huggingface/test_changes.py", k="makes_of_its_batches")
fault = of("integrations/transformers/pack_loss.py", killer)
fault(
    "a token of a mean of a batch counts by its pack",
    "1.0 / np.array(divisors)",
    "np.full(len(divisors), np.mean(1.0 / np.array(divisors)))",
)
fault = of("integrations/transformers/probe_samples.py", killer)
fault(
    "a probe weighs both samples alike, a mean of means",
    "num_targets(one) if divisor is None else float(divisor)",
    "sum(map(num_targets, samples)) / 2",
)
fault = of("integrations/transformers/supported.py", killer)
fault(
    "forwards of older adapters are looked for at hooks that they go past",
    'outer.base_model if hasattr(outer, "get_base_model") else outer',
    "unwrapped(accelerator, model)",
)
fault = of("integrations/transformers/trainer.py", killer)
fault(
    "a Trainer's batches are told apart by their tokens",
    "coming.taken.",
    'if all(inputs["input_ids"].tolist() != one.inputs["input_ids"].tolist() for one in coming.taken):\n'
    "        coming.taken.",
)
fault("a script's _prepare_inputs is let at packs", "(trainer, _prepare_inputs=lambda inputs: inputs):", "(trainer):")
fault("a run that an exception ended is held against the next", "is None or coming.run is not trainer.state", "is None")
fault = of("integrations/transformers/planning.py", killer)
fault("a step without a target ends the run", "if not samples.places:\n        return None", "assert samples.places")
killer = cases("integrations/huggingface/test_changes.py", k="later")
fault = of("integrations/transformers/trainer.py", killer)
fault("a model that a script changes later is trusted", "state.measured.clear()", "pass")
killer = cases("integrations/huggingface/test_changes.py", k="cannot_be_planned")
fault = of("integrations/transformers/trainer.py", killer)
fault("a step of the script's own between batches is planned", "everyone(own_step(trainer))", "everyone(None)")
fault = of("integrations/transformers/supported.py", killer)
fault("callbacks between batches are not looked at", "*(one.on_substep_end for one in", "*(one for one in () and")
fault = of("integrations/transformers/probe_samples.py", killer)
fault("a loss is measured in its first step alone", "if late is None:", "if late or not late:")
fault(
    "a loss that the model's loss function has no part in is planned",
    "if loss is not None:\n            loss.refuse_unused()",
    "pass",
)
fault = of("integrations/transformers/proof.py", killer)
fault("buffers of a forward are not looked at", "self._changed()) is not None", "self._changed()) is True")
fault(
    "a loss that raises anyhow is taken for the measurement's fault",
    "None and not any(everyone(probe.raises_on_row(experiment.within)))",
    "None",
)
killer = cases("integrations/huggingface/test_supported.py", k="stays_as_it_is")
fault = of("integrations/unmodified/planned_loop.py", killer)
fault("a script that cannot be planned ends", "isinstance(error, (RankError, RequestError))", "error")
killer = cases("integrations/huggingface/test_supported.py", k="required")
fault = of("integrations/unmodified/planned_runs.py", killer)
fault("plans that are required are not", "os.environ.get(REQUIRE)", "os.environ.get(CHECK)")
killer = cases("integrations/huggingface/test_changes.py", k="is_refused")
fault = of(
    "integrations/transformers/planning.py", cases("integrations/huggingface/test_changes.py", k="stay_as_they_are")
)
fault("batches of one step may be divided by several numbers", "is None or len(divisors) > 1", "is None")
fault = of("integrations/transformers/stage.py", killer)
fault(
    "what a compute_loss makes of a pack is not looked at",
    "own._version != self._versions[key] or not (taken is own or _is_copy(taken, own))",
    "False",
)
fault = of("integrations/transformers/hooks.py", killer)
fault("every hook on a parameter passes for linear", "proven = _is_linear(hook, before, after)", "proven = True")
killer = cases("integrations/huggingface/test_folder.py")
fault = of("integrations/huggingface/folders/reading.py", killer)
fault("a shard may lie outside of its folder", "if Path(file).name != file or not", "if not")
fault("unlike weights are one where their first rows agree", "0, rows,", "0, min(rows, _COMPARED_ROWS),")
fault("a tensor that its shard lacks is looked for in it", "if tensor not in heads[str(file)]:", "if tensor in ():")
fault(
    "of a tensor that is read in pieces the columns are all there",
    "piece, *cut",
    "piece, *(slice(None, c.stop - c.start) for c in cut)",
)
fault = of("integrations/huggingface/folders/conversion.py", killer)
fault("rows of experts are those of the first ones", "for key in keys[rows]", "for key in keys[: len(keys[rows])]")
fault("a model may lack a tensor of its folder", "if missing:", "if missing and not self._sources:")
fault = of("integrations/huggingface/folders/writing.py", killer)
fault("a config names the type that its folder had before", "num_tensors:", "num_tensors and not self._config:")
fault(
    "what an export has begun stays where it fails",
    "finally:\n            shutil.rmtree(self._aside, ignore_errors=True)",
    "finally:\n            pass",
)
fault = of("integrations/huggingface/inputs.py", cases("integrations/huggingface/test_inputs.py"))
fault("an entry that the model reads is left out of a batch", " or any(_reads(one, key) for one in sources)", "")
killer = cases("integrations/huggingface/test_mixers.py", k="packs_are_exact")
fault = of("integrations/huggingface/attention.py", killer)
fault("a window has a token more than the model's", "is None else int(window) - 1", "is None else int(window)")
fault = of("integrations/huggingface/mixers.py", cases("integrations/huggingface/test_mixers.py", k="border"))
fault("a state runs over the border of two samples", "None else forms[holder]", "None or forms else forms[holder]")
fault("a part that mixes tokens is not searched for", "None or layer not in packs", "not None or layer not in packs")
fault = of("integrations/huggingface/mixers.py", cases("integrations/huggingface/test_mixers.py", k="pack_again"))
fault("a recomputed layer has no pack", "packs.update(own)", "pass")
killer = cases("integrations/huggingface/test_parts.py")
fault = of("integrations/transformers/multimodal/parts.py", killer)
fault("a picture follows another row", "whole = torch.cat(there)", "whole = torch.cat(there[::-1])")
fault(
    "a row without a picture takes its neighbour's",
    "(key, kind, group), [0, *accumulate(counts)]",
    "(key, kind, group), [0, *accumulate(counts[1:] + counts[:1])]",
)
fault = of("integrations/transformers/multimodal/work.py", killer)
fault("an image is counted as no work by its tower", "if tower is None:", "if tower is None or not values.is_sound:")
fault = of("integrations/transformers/probe_samples.py", cases("integrations/huggingface/test_proof.py", k="counted"))
fault("a model's own attention is not seen to be its own", "calls != layers * forwards", "calls > layers * forwards")
killer = cases("integrations/huggingface/test_proof.py")
fault = of("integrations/transformers/proof.py", killer)
fault("a loss is measured where its penalty is 0", "with moved(self._outer, side)", "with nullcontext()")
fault("a loss that is no sum over samples is planned", "- total) > self.tolerance / 5 * sum(abs", "- total) > sum(abs")
fault = of("integrations/transformers/probe_samples.py", killer)
fault("rotary tables of a pack's longest count pass", '["positions"] > longest', '["positions"] > 64')
fault(
    "a loss of another divisor is planned", "- planned.loss) <= _LINEAR * abs(planned", "- planned.loss) <= abs(planned"
)
fault(
    "a loss that shifts labels itself has its samples cut",
    "_halves(probe, packed, labels=IGNORE)",
    "_halves(probe, packed)",
)
fault = of("integrations/transformers/trainer.py", killer)
fault("a loss that is another one each time is tried in rows", "fault.what == UNSTEADY", "fault.what is None")
fault = of("integrations/transformers/conditions.py", killer)
fault("a measurement counts in the script's own metrics", "(twin, name, copy.deepcopy(value))", "(twin, name, value)")
fault("a measurement logs", "twin.log = lambda *_, **__: None", "pass")
killer = cases("integrations/huggingface/test_rows.py")
fault = of("integrations/huggingface/rows.py", killer)
fault("a padded row stands on the wrong side", "if form.left:", "if not form.left:")
fault("a row of a padded group has another one's labels", ": labels_BT,", ": labels_BT[:1].expand_as(labels_BT),")
fault = of("integrations/transformers/trainer.py", killer)
fault(
    "padded groups are divided by their own targets",
    "(inputs, num_items)",
    '(inputs, max(1, int((inputs["labels"][:, 1:] != -100).sum())))',
)
killer = cases("integrations/huggingface/test_samples.py")
fault = of("integrations/huggingface/refusals.py", killer)
fault("labels on padding are dropped with their padding", "if bool(counts.any()):", "if False:")
fault = of("integrations/huggingface/samples.py", killer)
fault("a flattened row is one sample", "[*(starts_T.nonzero().flatten() + first).tolist(), stop]", "[first, stop]")
fault("labels that go with some logits move by one", "[:, kept_K[:-1] + 1] = labels_BK", "[:, kept_K[:-1]] = labels_BK")
killer = cases("integrations/huggingface/test_trainer.py::test_plans_of_the_packing_plugin_are_exact")
fault = of("integrations/transformers/trainer.py", killer)
fault(
    "a Trainer's loss is divided by the targets of one rank",
    "(inputs, num_items)",
    "(inputs, sum(int((s[1, 1:] != -100).sum()) for s in batch.samples.own.values()))",
)
fault = of("integrations/transformers/stage.py", killer)
fault("a Trainer's last pack runs twice", "if all", "program = (*program, *program[-2:])\n    if all")
fault(
    "a Trainer's packs have no borders",
    "attention.set_attention(model, attention.NAME)",
    "model.config._attn_implementation",
)
fault("a Trainer's gradients are summed over ranks one pass early", "self._left == 1", "self._left == 2")
fault = of("integrations/huggingface/inputs.py", killer)
fault("a Trainer's slice loses the label behind it", '"shift_labels": pack.labels_T[None],', "")
fault = of("runtime/world/exchange.py", killer)
fault("a Trainer's sample goes to the ranks with another's tokens", "numbers, parts,", "numbers[::-1], parts,")
killer = cases("integrations/huggingface/test_units.py", k="figures or sft or places or of_one")
fault = of("integrations/huggingface/units.py", killer)
fault(
    "a pair is split",
    "place in range(form.num_rows) for unit in units",
    "unit in units for place in range(form.num_rows)",
)
fault(
    "a row of a unit stands on the wrong side",
    "most - len(row[key]) if left else 0",
    "0 if left else most - len(row[key])",
)
fault("a row's old log-probabilities follow another row", "else value[n].clone() for", "else value[n - 1].clone() for")
fault("an answer without a partner passes", "if rows % num_rows:", "if False:")
fault = of("integrations/transformers/pack_call.py", killer)
fault("what a pack gives goes back to other rows", "(0, self.slots_M, own_M)", "(0, self.slots_M.flip(0), own_M)")
fault = of("integrations/transformers/units/call.py", killer)
fault("every micro-batch of units counts as a whole batch", "len(self._own) / self._divisor", "float(bool(self._own))")
fault(
    "figures of units are weighed alike",
    "{key: _weight(key, self._own, by_token) for key in figures}",
    "dict.fromkeys(figures, 1)",
)
fault = of("integrations/transformers/units/proof.py", killer)
fault(
    "a mean of means passes for a mean of units",
    'probe.refuse_other_sum("a batch"',
    'return Proof(None)\n        ("a batch"',
)
fault = of("integrations/transformers/units/step.py", killer)
fault("a sum over units counts as their mean", "batch.divisor if units.of_mean else None", "batch.divisor")
fault = of("core/planning/notes.py", cases("core/planning/test_chain.py", k="trees_without"))
fault("trees that share nothing are not named", "if recipe.trees_asked:", "if False:")
fault = of(
    "integrations/transformers/units/batches.py",
    cases("integrations/huggingface/test_units.py", k="unlike_counts"),
)
fault(
    "a trie is over rows of two micro-batches with unlike divisors",
    "counts.pop() if len(counts) == 1 else None",
    "max(counts)",
)

killer = cases("integrations/megatron/test_dropout.py", k="whatever_the_plan or hooks")
fault = of("runtime/adapters/hooks.py", killer)
fault("dropout counts from the start of a slice", "pack.positions_T,", "torch.arange(len(samples_T)),")
fault = of("runtime/adapters/product.py", killer)
fault(
    "the gradient of an adapter's input does not go through its dropout",
    "part.dropped(dz_tr @ layer.a_rC.to(dz_tr.dtype), layer.place)",
    "dz_tr @ layer.a_rC.to(dz_tr.dtype)",
)
killer = cases("integrations/megatron/test_experts.py", k="ep2-slices or ep4-packs or dummies or recompute")
fault = of("runtime/experts/routing.py", killer)
fault("a dummy counts in the losses of routers", "pack.sequence_ids_T != PADDING", "pack.sequence_ids_T >= PADDING")
fault(
    "the balance loss of a sequence is that of its pack",
    "self._complete_counts(routed, piece.sequence)",
    "routed.counts()",
)
fault("losses of routers count prompts among the targets", "loss_divisor(lengths, labels)", "loss_divisor(lengths)")
fault = of("runtime/experts/copies.py", killer)
fault("of several copies one alone sends its gradient home", "add_(part) if add else place.copy_(part)", "copy_(part)")
fault("copies that come in pieces keep their gradients", "self._pieces_summed(gradient_CN)", "gradient_CN")
fault = of("runtime/experts/balance.py", killer)
fault("the copies of a rank are taken for one another", "self.copies[rank]", "reversed(self.copies[rank])")
fault = of("integrations/megatron/reduction.py", killer)
fault(
    "the norm counts the experts of one rank",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_model_parallel_group",
)
fault = of("integrations/megatron/model/experts.py", killer)
fault("a token that runs again moves the bias of its experts again", "if torch.is_grad_enabled():\n            ", "")
killer = cases("integrations/megatron/test_experts.py", k="cut_over and (recompute or padded)")
fault = of("runtime/experts/copies.py", killer)
fault(
    "gradients of cut experts go by the layout of another pass",
    "gradient_CN = self.journey,",
    'Fetch.past = getattr(Fetch, "past", self.journey), self.journey\n        gradient_CN =',
)
fault = of("core/experts/messages.py", killer)
fault("the pieces of a rank are taken for those of its neighbour", "expert, r, count", "expert, (r + 1) % count, count")
killer = cases("integrations/megatron/test_experts.py", k="go_once and shared")
fault = of("integrations/megatron/model/expert_gate.py", killer)
fault(
    "a token's outputs are weighed again where nodes' sums come together",
    "(output)",
    "(output * self._dispatcher.probs.sum(dim=1, keepdim=True))",
)
killer = cases("integrations/megatron/test_experts.py", k="start_losses and fp32")
fault = of("integrations/megatron/saving/optimizer.py", killer)
fault(
    "all groups of experts' optimizers get the settings of one", 'of_decay[group["wd_mult"]', 'holder["param_groups"][0'
)
killer = cases("integrations/megatron/test_experts.py", k="copies_where_tokens_come_from")
fault = of("runtime/experts/routing.py", killer)
fault(
    "losses of routers are multiplied by the number of targets where these have weights",
    "lengths, labels",
    "lengths, labels and labels._replace(weights=None)",
)
killer = cases("integrations/megatron/test_generate.py", k="data")
fault = of("integrations/host/moving.py", killer)
fault("a sample is lost in a move", "schedule.put(self._sample(i, part))", "self._sample(i, part)")
fault("a sample that moved is on two ranks", "schedule.drop(places[i])", "_ = places[i]")
fault("a move restarts the noise of a sample", "seed, request.number, number", "seed, request.number, 0")
fault("a sample that moves loses its last token", "(token) for token in tokens", "(token) for token in tokens[:-1]")
fault = of("runtime/adapters/by_sample.py", cases("integrations/megatron/test_gradients.py", k="tp2 and not pp2"))
fault(
    "what tensor-parallel ranks hold alike is projected by each",
    "matrix.place.shares(matrix.kind) or self._peers.counts",
    "True",
)
fault(
    "a shard is projected as if it began its matrix",
    "matrix.place.part_of(places, matrix.kind).flatten()",
    "places.flatten()[: matrix.value.numel()]",
)
fault = of("runtime/adapters/by_sample.py", cases("integrations/megatron/test_gradients.py", k="shared"))
fault("Adam turns the part of a sample that each rank has", "self._peers.sum_over_owners(parts)", "pass")
fault = of("integrations/host/gradients.py", cases("integrations/megatron/test_gradients.py", k="alone"))
fault("the mean of weighted losses is by their number", ") if scores.weights is None else scores.weights", ")")
fault("two forwards are one step apart", "(ahead - behind) / (2 * step)", "(ahead - behind) / step")
fault = of("integrations/host/tenants.py", cases("integrations/megatron/test_isolation.py", k="one"))
fault("a tenant that has failed is updated", "self._results.items() if not result.failed", "self._results.items()")
killer = cases("integrations/megatron/test_pipeline.py", k="that_the_recipe_says")
fault = of("integrations/megatron/base/traits.py", killer)
fault("Megatron is given the layers of stages backwards", "for own in layers", "for own in layers[::-1]")
killer = cases("integrations/megatron/test_score.py", k="slices")
fault = of("runtime/stage/executor.py", killer)
fault("keys of a sequence stay when its last slice has been scored", "and stop == self._plan", "and stop > self._plan")
fault = of("integrations/host/scoring.py", killer)
fault(
    "the loss of a later slice counts twice in a score",
    "(losses_T, pack)",
    "(losses_T, pack)\n"
    "        sums = sums * torch.tensor([2.0 if s.start else 1.0 for s in pack.slices], dtype=sums.dtype)",
)
killer = cases("integrations/megatron/test_score.py", k="packs")
fault = of("integrations/host/scoring.py", killer)
fault(
    "a token below the reference takes from the excess of others",
    '(losses_T - there["reference"]).clamp(min=0)',
    'losses_T - there["reference"]',
)
fault("places of a slice begin anew in the vector of its sample", "piece.start + 1, piece.start + piece.", "1, piece.")
fault = of("integrations/host/host.py", killer)
fault("a token's loss stands at the token before it", "losses_L.roll(1)", "losses_L")
killer = cases("integrations/megatron/test_sequence_parallel.py", k="llama or 2-1-slices or other")
fault = of("integrations/megatron/model/norms.py", killer)
fault("the gradient of a norm is that of a rank's part of the tokens", "True", "False")
fault = of("integrations/megatron/model/experts.py", killer)
fault(
    "padding of divided packs counts for routers",
    "is_token(self.pack)[self.share]",
    "torch.ones_like(is_token(self.pack)[self.share])",
)
fault(
    "routers of all tensor-parallel ranks take the first one's tokens for theirs", "self.tp_group.rank() * slots", "0"
)
fault = of("integrations/megatron/stage.py", killer)
fault(
    "a replay takes the inputs of the first tensor-parallel rank",
    "parallel_state.get_tensor_model_parallel_rank() * len(like_TC)",
    "0",
)
killer = cases("integrations/megatron/test_slices.py::test_weights_that_add_up_to_0_train_by_their_divisor[dp2]")
fault = of("runtime/attention/labels.py", killer)
fault("a given divisor is rounded to an integer", "return float(divisor)", "return float(round(divisor))")
fault = of("integrations/megatron/host.py", killer)
fault(
    "gradients of weights that add up to 0 are not scaled",
    "checked_divisor(plan.lengths, labels) if weights",
    "round(float(weights.sums.sum()), 9) if weights",
)
fault = of("integrations/megatron/reduction.py", killer)
fault(
    "a replica has a divisor of its own",
    "is None else self._divisor",
    "is None else self._divisor * self.local_targets * dist.get_world_size() / self.totals[1]",
)
killer = cases("integrations/deepspeed/test_engine.py::test_gradients_are_those_of_plain_training[1]")
fault = of("integrations/deepspeed/engine/host.py", killer)
fault(
    "DeepSpeed divides each loss by what weights add up to, whatever is given",
    '"weight": share / divisor',
    '"weight": share / (step.labels.weights.sums.sum() if step.labels and step.labels.weights else divisor)',
)
fault = of("integrations/deepspeed/engine/stage.py", killer)
fault(
    "a micro-batch has a divisor of its own",
    "return loss * self._weight",
    "return loss / pack.num_targets",
)
killer = cases("integrations/deepspeed/pipeline/test_pipeline.py", k="stages_give and 2-1-names1")
fault = of("integrations/deepspeed/pipeline/host.py", killer)
fault(
    "DeepSpeed's pipeline divides each loss by what weights add up to, whatever is given",
    '"weight": 1 / divisor',
    '"weight": 1 / (step.labels.weights.sums.sum() if step.labels and step.labels.weights else divisor)',
)
killer = cases("training/test_divisors.py")
fault = of("data/sources.py", killer)
fault("tokens of weight 0 are not in the divisor", "documents.weighed_spans or documents.spans", "documents.spans")
fault = of("plugins/lora/state/drawing.py", killer)
fault(
    "tenants have the divisor of the first", "divisor=divisors or None", "divisor=next(iter(divisors.values()), None)"
)
fault = of("training/drawing.py", cases("training/test_divisors.py", k="policy"))
fault("samples that are left out are not in the divisor", ", samples[runs], left_out)", ", samples[runs])")
killer = cases("integrations/megatron/test_slices.py::test_random_plans_give_the_gradients_of_plain_training[one]")
fault = of("runtime/attention/labels.py", killer)
fault(
    "the weighted loss is divided by the number of targets", "labels.weights.divisor_of(", "float(labels.targets.sum()"
)
fault = of("runtime/attention/pack.py", killer)
fault(
    "the weighted loss is a mean of the means of packs",
    'rows["weights_T"] = weights_T',
    'rows["weights_T"] = weights_T / weights_T.sum()',
)
fault(
    "the first slice of a sequence alone has its weights",
    "values_of(piece.sequence)[piece.start + 1 : piece.stop + 1]",
    "values_of(piece.sequence)[piece.start + 1 : piece.stop + 1] ** (not piece.start)",
)
fault = of("runtime/adapters/hooks.py", cases("integrations/megatron/test_tenants.py", k="recomputes_every_layer"))
fault(
    "a recomputed layer has the tenants of the pack that ran last",
    "running.spans = self._spans(pack)",
    "self._last = self._spans(pack) if running is self._running[0] else self._last\n"
    "            running.spans = self._last",
)
fault = of("runtime/adapters/company.py", cases("integrations/megatron/test_tenants.py", k="gets_alone and one"))
fault("a tenant is divided by the weights of all", "divisor_of(own, tenant)", "divisor_of(slice(None), tenant)")
fault(
    "a tenant is divided by what its weights add up to, whatever is given", "divisor_of(own, tenant)", "divisor_of(own)"
)
killer = cases("plugins/lora/test_replicas.py", k="what_one_shape_trains")
fault = of("runtime/adapters/company.py", killer)
fault(
    "a replica divides by the targets of its part",
    "own = self.tenants == tenant\n",
    "own = (self.tenants == tenant) & np.isin(np.arange(len(self.tenants)), self.places)\n",
)
fault = of("runtime/adapters/adapters.py", killer)
fault("gradients of other replicas are left out", "        job.add_up(flat)\n", "")
fault(
    "gradients of the first replica count twice",
    "whole.copy_(matrix.gradient)",
    "whole.copy_(matrix.gradient * (2 if job.rank == 0 else 1))",
)
fault = of("integrations/host/tenants.py", killer)
fault("each replica clips by a norm of its own", "norms = commit(norms)", "commit(norms)")
fault = of("runtime/adapters/hooks.py", killer)
fault("dropout goes by the place in a replica's part", "[numbers[place] for place in here]", "list(range(len(here)))")
fault = of("runtime/world/replicas.py", killer)
fault("each replica has a leader", "return rank == 0 if _leads is None else _leads", "return rank == 0")
fault = of("training/replicas.py", killer)
fault("a replica trains what another one has, too", "(replica_of == self.own)", "(replica_of >= self.own)")
fault = of("plugins/lora/arrivals/job.py", killer)
fault("a copy that runs for nothing is trained on", "if draw.part and not draw.part.counts:", "if False:")
killer = cases(
    "commands/test_verify.py::test_replicas_of_a_whole_model_are_exact_and_hold_the_same_bits[tied]",
)
fault = of("integrations/megatron/exchange.py", killer)
fault("the sum over replicas is the first one's", "reduce(torch.add, in_order)", "reduce(lambda one, _: one, in_order)")
fault(
    "what the first replica has counts twice",
    "reduce(torch.add, in_order)",
    "reduce(torch.add, in_order) + (values[box] if replica == 0 else 0)",
)
fault(
    "the last stage's tied embedding is left as its replica has it",
    "for target in targets[box]:",
    "for target in targets[box] if box in values else ():",
)
fault = of("integrations/megatron/host.py", killer)
fault(
    "a replica clips by a norm of its own",
    "norm = commit(self.norm({})) if self._clips else None",
    "norm = commit(0.0) + self.norm({}) * (1 + is_replica() * id(self) % 7) if self._clips else None",
)
fault = of("integrations/megatron/reduction.py", killer)
fault("each replica divides by its own targets", "        job.add_up(totals)\n", "        pass\n")
fault("what the ranks of a replica sum counts for each of them", "if dist.get_rank():", "if False:")
fault = of("integrations/megatron/host.py", killer)
fault("the gradients of replicas are not exchanged", "clock, divisor, self._exchange)", "clock, divisor)")
killer = cases("integrations/megatron/test_tenants.py::test_three_steps_move_adapters_as_a_textbook_does[dp2]")
fault = of("runtime/adapters/adapters.py", killer)
fault(
    "the part of an adapter that another rank owns is not taken", ".copy_(values)", "[tenant.run] = values[tenant.run]"
)
killer = cases("integrations/megatron/test_tenants.py::test_three_steps_move_adapters_as_a_textbook_does[dp2tp2]")
fault = of("runtime/adapters/tenant.py", killer)
fault("the norm of a tenant counts what tensor-parallel ranks hold alike on each of them", "or counts:", "or True:")
killer = cases("integrations/megatron/test_tenants.py::test_three_steps_move_adapters_as_a_textbook_does[one]")
fault = of("runtime/adapters/adapters.py", killer)
fault("tenants of a step share a divisor", "div_(divisors[number] or 1)", "div_(sum(divisors.values()))")
fault(
    "a tenant without data is updated, too",
    "rates):\n            self._tenants[number].update(rates[number], norms[number]",
    "self._tenants):\n            self._tenants[number].update(rates.get(number, 1e-3), norms.get(number, 0.0)",
)
fault = of("integrations/host/tenants.py", killer)
fault(
    "an update of tenants moves a weight of the base",
    "({number: lr[number] for number in good}, good)",
    "({number: lr[number] for number in good}, good)\n        next(self._host.model.parameters()).data.mul_(1 + 1e-9)",
)
fault("tenants are clipped by the norm of all of them", ", good", ", dict.fromkeys(good, self.norm({}))")

killer = cases("integrations/megatron/saving/test_checkpoint.py", k="same_layout and fp64")
fault = of("integrations/megatron/saving/checkpoint.py", killer)
fault("generators of random numbers begin anew after a resume", '"][name])', '"][name]) if name == "" else None')
killer = cases("integrations/megatron/saving/test_checkpoint.py", k="no_checkpoint_of_this")
fault = of("integrations/megatron/saving/checkpoint.py", killer)
fault("a checkpoint of other frozen weights is taken", '"distributed_optimizer", "freeze"', '"distributed_optimizer"')
fault = of("integrations/megatron/saving/optimizer.py", cases("integrations/megatron/saving/test_optimizer.py"))
fault("moments lie without the padding of their buckets", "[key] = _with_padding(values, buffer)", "[key] = values")

killer = cases("integrations/megatron/unmodified/test_chunks.py", k="dummies")
fault = of("integrations/megatron/unmodified/running/chunks.py", killer)
fault(
    "an interleaved schedule is given a remainder that it refuses",
    "max(0, stages - number % group) if number % group",
    "group - number % group if number % group > stages",
)
killer = cases("integrations/megatron/unmodified/test_context_parallel.py", k="means and not dp2 and not pp2")
fault = of("integrations/megatron/unmodified/reading/context_parallel.py", killer)
fault("context-parallel ranks have chunks in a row, not in zig-zag", "min(k, chunks - 1 - k)", "k // 2")
fault("a context-parallel rank counts its first chunk twice", "chunks[rank] + chunks[-1 - rank]", "2 * chunks[rank]")
fault = of("integrations/megatron/unmodified/planning/call_plan.py", killer)
fault("every context-parallel rank reports what the first one has", "number(i, place_in_row)", "number(i, 0)")
killer = cases("integrations/megatron/unmodified/test_forms.py")
fault = of("integrations/megatron/unmodified/reading/borders.py", killer)
fault(
    "a row of samples is one sample",
    "(row, start, n) for n, (start, size) in zip(true, slots, strict=True) if size",
    "(row, 0, width)",
)
fault(
    "the padding behind a sample counts to it", "] if lengths is None else _differences(lengths[row], inside, row)", "]"
)
fault = of("integrations/megatron/unmodified/reading/form.py", killer)
fault(
    "the borders of a pack leave its padding out",
    'cu_seqlens if looks.get(twin) or key == "cu_seqlens_unpadded" else pack.cu_seqlens_padded',
    "cu_seqlens",
)
killer = cases("integrations/megatron/unmodified/test_hybrid.py", k="mamba")
fault = of("integrations/megatron/base/families.py", killer)
fault("samples of Mamba layers are packed", 'ATTENTION, MLP, EXPERTS = "*+",', 'ATTENTION, MLP, EXPERTS = "*+M",')
fault = of("integrations/megatron/stage.py", cases("integrations/megatron/unmodified/test_hybrid.py", k="recomputes"))
fault("layers of a hybrid model are recomputed in the plan alone", "decoder.layers[:layers]:", "decoder.layers[:0]:")
killer = cases("integrations/megatron/unmodified/test_hybrid.py", k="mean")
fault = of("integrations/megatron/unmodified/planning/user_loop.py", killer)
fault("every layer of a hybrid model counts as one with attention", "sum(map(kinds.count, ATTENTION)) / layers", "1.0")
killer = cases("integrations/megatron/unmodified/test_hybrid.py", k="refused")
fault = of("integrations/megatron/unmodified/refusals/layers.py", killer)
fault(
    "a layer that mixes tokens by something of its own is taken for one without attention",
    "isinstance(m, IdentityOp) or m in layers",
    "True",
)
killer = cases("integrations/megatron/unmodified/test_mesh.py", k="dp2 and means")
fault = of("integrations/megatron/unmodified/reading/samples.py", killer)
fault("positions of a part of a sample in a loop begin at 0", "(s.start, s.stop) for s", "(s.stop - s.start) for s")
killer = cases("integrations/megatron/unmodified/test_chunks.py", k="further and dp2 and not dp2pp2")
fault = of("integrations/megatron/unmodified/running/mtp.py", killer)
fault("further tokens weigh as if packs were micro-batches of the loop", " * divisor / of_rank[:, None]", "")
fault("the last token of a sample has a further target", "mask_T[start:end][layer + 1 :]", "mask_T[start:end][layer:]")
killer = cases(
    "integrations/megatron/unmodified/test_objective.py::test_gradients_and_reports_are_those_of_the_stock_loop[means]"
)
fault = of("integrations/megatron/unmodified/running/objective.py", killer)
fault("means of micro-batches count as if there were one", "(max(1.0, number) * num_micro_batches)", "max(1.0, number)")
killer = cases("integrations/megatron/unmodified/test_order.py", k="windows")
fault = of("integrations/megatron/unmodified/running/attention.py", killer)
fault(
    "scores stay divided by the number of the layer",
    "(core.layer_number if core.config.apply_query_key_layer_scaling else 1)",
    "1",
)
killer = cases("integrations/megatron/unmodified/test_packed.py", k="said_once")
fault = of("integrations/megatron/unmodified/running/forward_step.py", killer)
fault(
    "a stage that is told no borders passes for one that is",
    'call.get("packed_seq_params") is None',
    'call.get("packed_seq_params") is not None',
)
fault = of("integrations/megatron/unmodified/reading/batches.py", killer)
fault("rows of several samples pass for rows of one", "sum(map(len, samples)) >", "sum(map(len, samples)) <")
killer = cases("integrations/megatron/unmodified/test_packed.py", k="packed_samples and dp2")
fault = of("integrations/megatron/unmodified/running/forward_step.py", killer)
fault(
    "a loop's own parameters of its packs reach the model",
    '{**call, "packed_seq_params": self._params, "attention_mask": None}',
    '{"packed_seq_params": self._params, "attention_mask": None, **call}',
)
killer = cases("integrations/megatron/unmodified/test_packed.py", k="tensordicts and dp2")
fault = of("integrations/megatron/unmodified/planning/rows.py", killer)
fault("what was said of rows comes home in another order", "for place in places", "for place in reversed(places)")
fault("a mean over a micro-batch passes for a sum of rows", "_CLOSE = 1e-2", "_CLOSE = 1e2")
killer = cases("integrations/megatron/unmodified/test_reports.py")
fault = of("integrations/megatron/unmodified/running/reports.py", killer)
fault(
    "a rank reports by micro-batch what others report by pack",
    "all(one == of_ranks[0] for one in of_ranks)",
    "of_ranks",
)
fault("a loss that is its own report is not divided", "value = value / num_micro_batches", "value = value * 1")
killer = cases("integrations/megatron/unmodified/test_router_losses.py", k="means and tp2ep2")
fault = of("integrations/megatron/unmodified/running/experts.py", killer)
fault("the z-loss of a loop counts for all its micro-batches at once", "(num_microbatches * tokens_S)", "tokens_S")
fault = of("integrations/megatron/model/experts.py", killer)
fault("every tensor-parallel rank takes its router's slots for the first ones", "self.tp_group.rank() * slots", "0")
killer = cases("integrations/megatron/unmodified/test_router_losses.py", k="said_once")
fault = of("integrations/megatron/unmodified/planning/call_plan.py", killer)
fault(
    "padding is said to change losses where there is none",
    "planned.padded and (counting := _counting_padding(config))",
    "counting := _counting_padding(config)",
)
killer = cases("integrations/megatron/unmodified/test_rows.py")
fault = of("integrations/megatron/unmodified/running/objective.py", killer)
fault("losses of rows are divided by the number of micro-batches that run", " if per_token else len(batches) / own", "")
fault("a repeated row has a loss", "loss * (float(real) * self._scale),", "loss * self._scale,")
fault("a repeated row counts tokens", "number * int(real)", "number")
killer = cases("integrations/megatron/unmodified/test_sharing.py")
fault = of("integrations/megatron/unmodified/planning/sharing.py", killer)
fault("losses of ranks that share samples in a loop do not meet", "check(_in_launch_rounds(plan))", "plan")
fault = of("core/plan/token_layout.py", killer)
fault("a shared sample is sent to one of its ranks alone", "[piece.sequence].add(rank)", "[piece.sequence] = {rank}")
killer = cases("integrations/megatron/unmodified/test_together.py", k="copies")
fault = of("integrations/megatron/unmodified/refusals/layers.py", killer)
fault("sinkhorn routes regrouped samples", '("sinkhorn", "quantile_balancing")', '("quantile_balancing",)')
fault = of("integrations/megatron/stage.py", cases("integrations/megatron/unmodified/test_together.py", k="order_of"))
fault("a loss in an order of whole micro-batches is that of one alone", "self._shape.number if self._shape else 1", "1")
killer = cases("integrations/megatron/unmodified/test_transformer_engine.py", k="latent and yarn")
fault = of("integrations/megatron/unmodified/running/attention.py", killer)
fault("latent attention has the scale of plain attention", 'getattr(layer, "softmax_scale", None) or config', "config")
fault(
    "Transformer Engine is told of one sample in a pack",
    "cu_seqlens_padded, max(end - first for first, end in pairwise(pack.segments))",
    "cu_seqlens_padded[[0, -1]], pack.segments[-1]",
)
killer = cases("integrations/megatron/unmodified/test_transformer_engine.py", k="windows")
fault = of("integrations/megatron/unmodified/refusals/layers.py", killer)
fault("windows lie in the layers beside theirs", "every, layer.layer_number", "every, layer.layer_number + 1")
killer = cases("integrations/megatron/unmodified/test_transformer_engine.py", k="interleaved")
fault = of("integrations/megatron/unmodified/running/attention.py", killer)
fault("interleaved angles go to the fused kernel, which does not interleave packs", "config.rotary_interleaved or ", "")

fault = of("patches/megatron_fixes.py", cases("patches/test_megatron_fixes.py"))
fault(
    "a loop's optimizer begins anew where the checkpoint has steps",
    '{**tensors, "step": step}',
    '{"step": step, **tensors}',
)
fault("a loop's optimizer counts one step for all parameters after a resume", 'state["step"].clone()', 'state["step"]')

killer = cases("plugins/rollout")
fault = of("plugins/rollout/score.py", killer)
fault("the tail of a length is its shortest tenth", "_CHANCES < TAIL,", "_CHANCES > 1 - TAIL,")
fault = of("plugins/rollout/lengths.py", killer)
fault("samples that were cut count as ended", "if not ended.all():", "if not ended.any():")
fault = of("plugins/rollout/play.py", killer)
fault("a cap on keys is counted without those of the prompt", "self._keys += prompt + tokens", "self._keys += tokens")
fault("a sample that went back draws its tokens again", "[sample] = self._step - tokens", "[sample] = self._step")
fault = of("plugins/rollout/collect.py", killer)
fault("samples are pruned until fewer are left than are to be kept", "len(going) - self.rule.keep", "len(going)")
fault = of("plugins/rollout/texts.py", cases("plugins/rollout/test_texts.py"))
fault(
    "an earlier text goes on where the sample has left it",
    "== sample.new[-_LEAST:]",
    "== own[max(0, done - _LEAST) : done]",
)
fault("the newest place counts, after however few equal tokens", "key=itemgetter(0), default", "key=bool, default")
fault(
    "texts of nobody are looked up in for a tenant", "hash((tenant, *text[-_LEAST:]))", "hash((None, *text[-_LEAST:]))"
)
fault = of("runtime/generate/drafts.py", cases("runtime/generate/test_engine.py", k="is_to_save or never_right"))
fault("drafts that never pay are asked for in every forward", "self._asks = False", "self._asks = True")
fault("what does not pay is never tried again", "self._left = _PROBE", "self._asks = False")
fault("a guess costs nothing for its keys", "+ self._costs.key_s * sample.length", "")
fault = of("plugins/rollout/quantized.py", cases("runtime/generate/test_quantized.py", m="not full"))
fault(
    "weights of the first generation draft in all",
    "    def make(earlier",
    "    @__import__('functools').cache\n    def make(earlier",
)
fault("guesses cost nothing", "(exact + depth * of_guess)", "exact")
fault = of("runtime/generate/quantized.py", cases("runtime/generate/test_quantized.py", m="not full"))
fault("a weight has the scale of another group", "/ scales_NU[..., None])", "/ scales_NU.roll(1, 1)[..., None])")
fault("a weight has the scale of another output", "/ scales_NU[..., None])", "/ scales_NU.roll(1, 0)[..., None])")
fault("a product that is not right is taken", "<= _AGREES * want_RN.norm()", "<= 9 * want_RN.norm()")
fault("a product that is slower is taken", "self._always or operator", "True or operator")
fault = of("runtime/generate/engine.py", cases("runtime/generate/test_quantized.py", m="not full"))
fault("a guess has the noise of the place before it", "[sample.length + guessed for", "[sample.length for")
fault("the key of a guess lies a place too early", "one.kept + depth, one.kept + depth + 1)", "one.kept, one.kept + 1)")
fault(
    "guesses are taken for what is drawn",
    "sample.new.append(token)",
    "sample.new.append(token if guess is None else guess)",
)
fault = of("runtime/attention/rounded_keys.py", cases("runtime/attention/test_rounded_keys.py"))
fault("a key has the step of another head", "torch.cat([step_TG1, least", "torch.cat([step_TG1.roll(1, 1), least")
fault("a key has the step of another token", "torch.cat([step_TG1, least", "torch.cat([step_TG1.roll(1, 0), least")
fault(
    "halves of a key of 4 bits are exchanged",
    "torch.cat([q_TGX & 15, q_TGX >> 4]",
    "torch.cat([q_TGX >> 4, q_TGX & 15]",
)
fault = of("runtime/attention/kv_cache.py", cases("runtime/attention/test_rounded_keys.py"))
fault("a block is copied without its steps", "for pool in kept:", "for pool in kept[::2]:")
killer = cases("runtime/attention/test_sparse.py")
fault = of("runtime/attention/sparse.py", killer)
fault(
    "the causal border lies a block early",
    "slice(block.begin, block.stop)",
    "slice(max(0, block.begin - grid.keys), block.stop)",
)
fault(
    "kept blocks have the sums of another head",
    "torch.cat(outs, 1), torch.cat(lses)",
    "torch.cat(outs, 1), torch.cat(lses).roll(1, 0)",
)
fault(
    "a head reads the kept blocks of another one",
    "places = chosen_GIJ[group, number]",
    "places = chosen_GIJ[-1 - group, number]",
)
fault(
    "a sample takes the kept blocks of another one",
    "(sample, layer, piece.start), choice",
    '("", layer, piece.start), choice',
)
fault(
    "a layer takes the kept blocks of another one",
    "(sample, layer, piece.start), choice",
    "(sample, 0, piece.start), choice",
)
fault("kept blocks are never searched again", "uses + 1 >= self.search_every", "False")
fault("a pass that searches says it has left pairs out", "kept if out_NHD is None else whole", "kept")
fault = of("runtime/attention/choosers.py", killer)
fault("a chooser sees keys after its queries", ") >= visible_P1, -torch.inf)", ") > visible_P1, -torch.inf)")
fault("the first block can be dropped", "always_J[0] = True", "always_J[0] = False")
fault("blocks of the least mass are kept", "sort(-1, descending=True)", "sort(-1)")
fault("keys are rounded by the steps of another head", "step_GM1 = (x_GMD.abs()", "step_GM1 = (x_GMD[:1].abs()")
fault = of("runtime/attention/pack.py", cases("integrations/megatron/test_score.py", k="packs"))
fault(
    "slices have the blocks of the one before",
    "sparse[place] = segment",
    "sparse[place] = next(iter(sparse.values()), segment)",
)
fault = of("plugins/rollout/generate.py", cases("plugins/rollout/test_generate.py", k="mark_of_a_run"))
fault("drafts make another run of the same samples", ', "drafts", "keys"}', ', "keys"}')
fault = of("plugins/rollout/plan.py", killer)
fault("a bound charges every sample a whole step", "work_s + costs.step_s / request.slots *", "work_s + costs.step_s *")
fault(
    "a bound takes samples of a step for alone in it",
    "middle - costs.step_s * tokens",
    "(middle - costs.step_s * tokens) / num_ranks",
)
fault = of("plugins/rollout/moves.py", killer)
fault("keys that are computed again cost nothing", "np.where(home[own] == low, 0.0, price[own])", "0.0")
fault("a sample that has moved moves on for nothing", "home[own] == low, 0.0", "taken_s[own] > seconds[own], 0.0")

killer = cases("plugins/data/test_mixes.py", "plugins/data/test_simulated_runs.py")
fault = of("plugins/data/mixes.py", killer)
fault("a reward of a domain that was not seen fades", "fresh, rewards", "fresh, keep * rewards")
fault("a bandit explores as much as in the step before", "for number in (step - 1, step)", "for number in (step, step)")
fault("excess is over the targets of all domains", "np.maximum(seen.targets, 1)", "np.maximum(seen.targets.sum(), 1)")
fault("the mean of alpha forgets its first step", "(alphas - average) / step", "(alphas - average) / (step + 1)")
fault = of("plugins/data/ado.py", killer)
fault("a law of scaling has no credit", "prior * np.sqrt(credit * (1 - credit))", "prior")
fault("the slope of a law is not over what was seen", "scale * here**-exponent / here", "scale * here**-exponent")
fault = of("core/policies.py", killer)
fault("losses of domains are summed in the order of the ranks", "math.fsum(values[own])", "float(sum(values[own]))")
fault("a policy that fails ends the run", "Exception as error:  # of whoever wrote it", "TypeError as error:")
killer = cases("plugins/data/test_selects.py")
fault = of("plugins/data/neighbours.py", killer)
fault("a transport stops one neighbour later", "enough[0] if enough.", "min(enough[0] + 1, rising.size - 1) if enough.")
fault = of("plugins/data/selects.py", killer)
fault("a window of progress begins one place later", "places >= first) & (places <", "places > first) & (places <")
fault = of("plugins/data/weights.py", cases("plugins/data/test_weights.py"))
fault("weights by loss are over sums of losses", "seen.losses / np.maximum(seen.targets, 1)", "seen.losses / 1.0")

fault = of("plugins/mesh/candidates/levelled.py", cases("plugins/mesh/candidates/test_levelled.py"))
fault("sequences dealt anew fill a micro-batch over its cap", "free_tokens[into]", "2 * free_tokens[into] + 9999")
fault(
    "sequences are dealt onto ranks as if nothing shared were there",
    "(outcome.busy_s + outcome.exposed_s)[0]",
    "0.5 * (outcome.busy_s + outcome.exposed_s)[0][::-1]",
)

killer = cases("plugins/moe/test_clone.py", "plugins/moe/test_reroute.py")
fault = of("plugins/moe/clone.py", killer)
fault(
    "tokens of copies that are too small are lost",
    "quotas_ER[np.arange(len(homes_E)), homes_E] += small_ER.sum(axis=1)",
    "pass",
)
fault(
    "copies stay though all of them take too little off the busiest rank",
    "quotas_ER if busiest - after >= least else at_home(counts_RE, policy, copies)",
    "quotas_ER",
)
fault = of("plugins/moe/reroute.py", killer)
fault("an even division over copies leaves the remainder out", "each + (place < more) for place", "each for place")
fault(
    "tokens over copies stop at the first bound of several",
    "-(-sum(tokens[rank] for rank in reached) // len(reached))",
    "max(tokens)",
)
fault = of("plugins/moe/history.py", killer)
fault("a rank is given a copy of an expert of its own", " and r != expert // own", "")
fault = of("plugins/moe/few.py", killer)
fault("a copy takes the slot of the rank that gives it", "free[taker] -= 1", "free[giver] -= 1")
fault = of("plugins/moe/nodes.py", cases("plugins/moe/test_nodes.py"))
fault("tokens of local copies are computed at home, too", "home_E = loads_E - np.", "home_E = loads_E - 0 * np.")
fault("local copies pay whatever their weights take", "size * policy.copy_tokens *", "0 *")
fault = of("plugins/moe/policy.py", cases("plugins/moe/test_policy.py"))
fault(
    "copies pay where all tokens are on one of a single rank",
    "* (context.layout.ep - 1) >= least_tokens(context)",
    ">= 0",
)

fault = of("core/costs/costs.py", cases("plugins/packing/test_beside.py"))
fault(
    "an image is counted as no work in its micro-batch",
    "[self.beside[s.sequence] for s in micro_batch.slices] if self.beside else []",
    "[]",
)
fault(
    "an image is counted as no work when samples are dealt",
    "np.array(self.beside).reshape(count, 2).sum(axis=1) if self.beside else np.",
    "np.",
)
fault = of("core/laws.py", cases("plugins/packing/test_groups.py"))
fault("a group that is split over two ranks passes the laws", "else m.ranks", "else 0")
fault("ranks with one sample more and one less pass the laws", "[-1] - counts[0] > 1:", "[-1] - counts[0] > 2:")
killer = cases("plugins/packing/test_padded.py")
fault = of("plugins/packing/padded.py", killer)
fault("a row is in two padded groups", "rows.order[stops[k] : stops[k + 1]]", "rows.order[stops[k] : stops[k + 1] + 1]")
fault = of("core/laws.py", killer)
fault("rows of several lengths pass for rows", "if not m.pad_to and len({s.length for s in m.slices}) > 1", "if False")
killer = cases("plugins/packing/test_shapes.py")
fault = of("core/costs/costs.py", killer)
fault(
    "what fills a micro-batch up costs nothing",
    "tokens += -tokens % np.array([m.round_to or 1 for m in micro_batches])",
    "pass",
)
fault = of("core/planning/terms.py", killer)
fault("the smallest micro-batch runs first", "key=lambda m: -m.num_padded_tokens", "key=lambda m: m.num_padded_tokens")

fault = of("runtime/attention/sharing/routing.py", cases("rehearsal/test_exact.py", k="share"))
fault("nobody waits for a message that was carried in several legs", "current.wait_stream(stream)", "pass")
fault("a message begins before what it carries is computed", "stream.wait_stream(current)", "pass")
killer = cases("rehearsal/test_exact.py", k="marked and stage")
fault = of("runtime/stage/copier.py", killer)
fault(
    "the backward does not wait for what comes back from host memory",
    "torch.cuda.current_stream(self._device).wait_event(moment)",
    "pass",
)
fault(
    "activations leave the device before they are computed",
    "stream.wait_stream(torch.cuda.current_stream(self._device))",
    "pass",
)
fault = of("runtime/stage/offload.py", killer)
fault("the memory of activations is freed while they still leave", "self._wait()\n        if self.", "if self.")
killer = cases("rehearsal/test_kernels.py", k="definition")
fault = of("runtime/attention/kernels.py", killer)
fault("flash-attn is asked for a window that counts the query itself", "(call.window, 0)", "(call.window - 1, 0)")
fault = of("runtime/attention/blocks.py", killer)
fault("flash-attn is told the scale by a name that it does not know", '"softmax_scale": x.scale', '"scale": x.scale')
fault(
    "flash attention gets a logsumexp whose rows lie apart",
    "contiguous()[None],  # the kernel reads it without looking at strides\n        *",
    "T.contiguous().T[None],\n        *",
)
killer = cases("rehearsal/test_kernels.py", k="quickstart or bytes")
fault = of("integrations/deepspeed/engine/experts.py", killer)
fault("experts whose rows are no whole 16 bytes go to the grouped product", "() and has_whole_rows(recipe)", "()")
fault = of("integrations/megatron/model/gpt.py", killer)
fault("float64 goes to the fused Adam", "with with_attributes(optimizers, **_TORCH_ADAM) if exact else ", "with ")
fault = of("runtime/stage/stage_links.py", cases("rehearsal/test_nccl.py", k="one_queue and turns"))
fault("a rank counts the queues of its device by the name of its group", '"nccl" in backends', 'backends == "nccl"')
fault = of("runtime/experts/gate.py", cases("rehearsal/test_recipes.py", k="moe"))
fault(
    "headers of experts come to the host at once",
    "return rows[:, COUNT_HEADER:counted]",
    "self._taken[0].rows.read()\n        return rows[:, COUNT_HEADER:counted]",
)
killer = cases("rehearsal/test_recipes.py", k="slices")
fault = of("runtime/attention/copy_rows.py", killer)
fault("a micro-batch goes to the device from memory that is not page-locked", "uint8, pin_memory=True", "uint8")
fault = of("integrations/megatron/batch.py", killer)
fault("a micro-batch asks the device for its number of targets", "(), pack.num_targets,", "(), int(weights_T.sum()),")
fault = of("runtime/world/world.py", killer)
fault(
    "a rank computes on the first rank's device", 'integer("LOCAL_RANK", 0, 0, RANKS) % torch.cuda.device_count()', "0"
)
fault = of("runtime/attention/kernels.py", killer)
fault(
    "queries come to a kernel with their heads last",
    "call.q_THD, call",
    "call.q_THD.transpose(1, 2).contiguous().transpose(1, 2), call",
)
fault = of("runtime/attention/pack.py", killer)
fault(
    "each row of a micro-batch is sent to the device by itself",
    "copy_rows(rows, device)",
    "{name: torch.tensor(row, device=device) for name, row in rows.items()}",
)
fault = of("integrations/megatron/reduction.py", killer)
fault(
    "one rank asks for its sums in another order",
    "dist.all_reduce(totals)",
    "for part in (totals, totals[:1])[:: 1 - 2 * (dist.get_rank() % 2)]:\n        dist.all_reduce(part)",
)
fault = of("runtime/attention/copy_rows.py", cases("rehearsal/test_scripts.py", k="transformers and bf16"))
fault("the host reads what has not come from the device", "self._copied.synchronize()", "pass")
fault = of("integrations/deepspeed/unmodified/loop.py", cases("rehearsal/test_scripts.py", k="another_batch"))
fault(
    "DeepSpeed takes another batch for a planned one",
    "not torch.equal(tokens_T.read(), planned.pack.tokens_T)",
    "len(tokens_T.read()) != len(planned.pack.tokens_T)",
)
fault = of("runtime/world/agreement.py", cases("rehearsal/test_scripts.py", k="megatron and dp2"))
fault("what ranks tell each other goes through NCCL from the host", 'if "cpu:" in dist.', 'if "cuda:" in dist.')

fault = of("runtime/unpickling.py", cases("runtime/test_unpickling.py"))
fault("checkpoints may run code", 'os.environ[FORCE] = "1"', 'os.environ[FORCE] = "0"')

killer = cases("runtime/adapters/test_adapters.py")
fault = of("runtime/adapters/tenant.py", killer)
fault("an adapter is clipped whatever its norm is", "if limit > 0 and norm > limit:", "if limit > 0:")
fault("Adam counts the steps of an adapter that goes on from 0", "(float(state.steps)), state.", "(0.0), state.")
fault = of("runtime/adapters/adapters.py", killer)
fault("gradients of the step before are added to a tenant's", "[number].gradients.zero_()", "[number].gradients")
fault("a tenant is charged for the moments of all owners", "values * (2 + 2 / self._peers.num_owners)", "values * 4")
fault = of("runtime/adapters/projection.py", cases("runtime/adapters/test_projection.py"))
fault("a projection's signs are those of the shard", "places ^ key", "torch.arange(len(places), device=device) ^ key")
killer = cases("runtime/adapters/test_by_sample.py")
fault = of("runtime/adapters/hooks.py", killer)
fault("a sample's gradient has the first token of its neighbour", "(first, first + size)", "(first, first + size + 1)")
fault = of("runtime/adapters/product.py", killer)
fault("the gradient of a cut sample is that of one slice", "[row], left[slots],", "[row].zero_(), left[slots],")
fault = of("runtime/adapters/by_sample.py", killer)
fault("a sample's gradient is multiplied by its targets", "self._own.gradients.div_", "self._own.gradients.mul_")
fault = of("runtime/adapters/product.py", cases("runtime/adapters/test_product.py"))
fault("the gradient of B lacks the scaling", "part.samples, layer.scaling", "part.samples")
fault("layers of a site read the products of the first one's ranks", "layer.ranks], layer", ": len(layer.a_rC)], layer")

fault = of("runtime/attention/decode_rows.py", cases("runtime/attention/test_by_block.py"))
fault("a row sees the key after its own, block by block", "> last_PQ1\n", "> last_PQ1 + 1\n")
fault("all queries of a row see what its last one sees", '"rows_P"]][..., None]', '"rows_P"], -1:][..., None]')
fault(
    "a block that several rows share is read for one of them alone",
    "last[blocks] != order",
    "np.zeros(len(blocks), dtype=bool)",
)
killer = cases("runtime/attention/test_pack.py", k="labels_of_a_batch")
fault = of("runtime/attention/labels.py", killer)
fault("prompts count in the divisor", " if labels is None else labels.targets.sum()", "")
fault = of("runtime/attention/pack.py", killer)
fault(
    "a label is shifted by one behind the border of a slice",
    "labels_of(piece.sequence)[piece.start + 1 : piece.stop + 1]",
    "labels_of(piece.sequence)[piece.start + (not piece.start) : piece.stop + (not piece.start)]",
)
fault(
    "a sequence gets the mask of another one",
    "targets = labels_of(piece.sequence)",
    "targets = labels_of(slices[0].sequence)",
)
killer = cases("runtime/attention/test_pack.py", k="its_own_weight")
fault = of("runtime/attention/labels.py", killer)
fault(
    "the sum of the weights is rounded to an integer", "(self.sums[places].sum())", "(round(self.sums[places].sum()))"
)
fault = of("runtime/attention/pack.py", killer)
fault(
    "a target has the weight of the token before it",
    "values_of(piece.sequence)[piece.start + 1 : piece.stop + 1]",
    "values_of(piece.sequence)[piece.start : piece.stop]",
)
fault("a sequence has the weight of its neighbour in the pack", "values_of(piece.", "values_of(slices[0].")
killer = cases("runtime/attention/test_prefix.py", "runtime/attention/test_windows.py")
fault = of("runtime/attention/prefix.py", killer)
fault(
    "dV of earlier slices is dropped by short slices",
    "entry.dv_PGD[: piece.stop].add_(dv_PNGD)",
    "start = 0 if piece.stop - piece.start > 4 else piece.start\n"
    "            entry.dv_PGD[start : piece.stop].add_(dv_PNGD[start:])",
)
fault("dK and dV are summed in bfloat16", "torch.promote_types(grad.dtype, torch.float32), copy=", "grad.dtype, copy=")
killer = cases("runtime/attention/test_windows.py")
fault = of("runtime/attention/sharing/running_job.py", killer)
fault("a window is forgotten where a sample is cut", "window, begin = self.call.window, 0", "window, begin = None, 0")
fault("the first key of a window is left out at the border of two slices", "- window", "- window + 1")
fault("gradients of the keys in a window go to the first keys", "[tile.keys - len(dk) : tile.keys] +", "[: len(dk)] +")
fault(
    "sinks take no weight from a cut sample",
    "sinks_H is not None",
    "sinks_H is not None and not any(part.cut for part in self.job.parts)",
)
fault = of("runtime/attention/kernels.py", killer)
fault("a window is a token too short in whole samples", "(behind <= window)", "(behind < window)")
fault(
    "a window crosses the border of two samples",
    "[end - first for first, end in pairwise(call.segments)]",
    "[end - first for first, end in pairwise(call.segments)]\n"
    "    lengths = lengths if call.window is None else [sum(lengths)]",
)
fault = of("runtime/attention/attention.py", killer)
fault("the output of narrow values is cut from the wrong side", "[..., :width]", "[..., -width:]")
fault = of("runtime/attention/blocks.py", killer)
fault("a soft cap is left out", "div_(x.softcap).tanh_().mul_(x.softcap)", "clamp_(-x.softcap, x.softcap)")

fault = of("runtime/experts/balance.py", cases("runtime/experts/test_balance.py"))
fault("nobody judges the quotas of a layer", "check_quotas(self._planner(counts_RE, policy, known), ", "self._planner(")
fault(
    "receivers of a layer's tokens know no nodes",
    "received_by(self.place, self.counts_RE, self.quotas_ER, self._node_ranks)",
    "received_by(self.place, self.counts_RE, self.quotas_ER)",
)
fault(
    "senders of a layer's tokens know no nodes",
    "sent_by(self.place, self.counts_RE, self.quotas_ER, self._node_ranks)",
    "sent_by(self.place, self.counts_RE, self.quotas_ER)",
)
killer = cases("runtime/experts/test_gate.py")
fault = of("runtime/experts/gate.py", killer)
fault("a planner of layers fails and no load says so", "failed=self._balance.failed", 'failed=""')
fault("what is sent to experts counts padding in loads", "ToHost(rows), counted", "ToHost(rows), COUNT_HEADER")
fault("ranks that share experts may run different passes", "if len(set(headers)) > 1:", "if len(set(headers)) > 2:")
fault("a rank that plans other quotas goes unnoticed", "layer, self._balance.checksum", "layer, 0")
fault = of("runtime/experts/balance.py", killer)
fault(
    "a layer that was planned says that the one before it failed",
    'known, self.failed = policy.copies_of(layer), ""',
    "known = policy.copies_of(layer)",
)
fault = of("runtime/experts/once.py", cases("runtime/experts/test_once.py"))
fault("a row is sent to the neighbour of its place in a node", "rank %", "(rank + dist.get_rank(group) // size) %")
fault(
    "a row for a node reaches the experts of another one",
    "own * slots, (num_nodes - 1 - own)",
    "(num_nodes - 1 - own) * slots, own",
)
fault("probabilities that go once to a node get no gradient", "[tokens, nodes]\n", "[tokens, nodes].detach()\n")
fault("ranks pass on what one of them has alone", ".sum(dim=0)", "[0]")
fault = of("runtime/experts/routing.py", cases("runtime/experts/test_routing.py"))
fault("counts of a shared sequence are taken before all are there", "if total == topk * int", "if total <= topk * int")
fault("a rank counts its own part of a shared sequence alone", "total_SE = own_SE + sum", "total_SE = own_SE + 0 * sum")

killer = cases("runtime/generate/test_engine.py")
fault = of("runtime/generate/engine.py", killer)
fault(
    "noise is that of a row of the batch", "sample.stream for sample in samples", "row for row, _ in enumerate(samples)"
)
fault("one of two end tokens is missed", "new[-1] in settings.end_tokens", "new[-1] in sorted(settings.end_tokens)[:1]")
fault(
    "one token too many is accepted",
    "[*sample.drafted, None]",
    "[picks[0][0], *sample.drafted[1:], None][: len(picks)]",
)
fault(
    "noise of a drafted token is that of the place before",
    "for sample in samples]) + after_R",
    "for sample in samples])",
)
fault("a draft goes beyond the limit", "if keeping else left) - 1", "if keeping else left)")
fault(
    "a stop string is seen at the end of a draft alone",
    "_end_of(sample, settings)\n        if how",
    "_end_of(sample, settings) if token != guess else None\n        if how",
)
fault = of("runtime/generate/engine.py", cases("runtime/generate/test_kept.py", k="drafts"))
fault("a sample is drafted past the border at which it waits", "keeping.left(sample) if keeping else left", "left")
fault = of("runtime/generate/dealing.py", cases("runtime/generate/test_dealing.py"))
fault("drafted tokens count as those of a prompt", "1 + known.get(piece.sequence, 0)", "1")
fault = of("runtime/attention/decode_rows.py", cases("runtime/generate/test_engine.py", k="drafts"))
fault("the key of a guess is visible to the token before it", "> last_PQ1\n", "> last_PQ1 + (self.longest > 1)\n")
fault = of("runtime/generate/schedule.py", cases("runtime/generate/test_schedule.py"))
fault("blocks of wrong guesses stay taken", "self._tables.shrink(sample.key, sample.length)", "pass")
fault = of("runtime/attention/decode_rows.py", killer)
fault("a sample sees the key that a stopped one left after its own", "places_L <= last_BQ1", "places_L <= last_BQ1 + 1")
fault = of("runtime/attention/block_tables.py", killer)
fault(
    "a sample writes into the block that its prompt shares with others",
    "[: tokens // self.block_tokens]",
    "[: self.size(tokens)]",
)
fault = of("runtime/generate/schedule.py", killer)
fault("a sample that was given up goes on without the keys of what it had", " = prefill.length", " = sample.length - 1")
fault(
    "a sample that goes leaves its keys", "live.remove(sample)\n        self._free_keys(sample)", "live.remove(sample)"
)
fault("a sample that comes has its old keys", "kept = prefill.length", "kept = max(prefill.length, sample.length - 1)")
fault = of("runtime/generate/kept.py", cases("runtime/generate/test_kept.py", k="plain_samples and pruned"))
fault("a border of samples is decided when the first has come to it", "return any", "return all")
fault("what ended before a border ends before the next one again", "lengths = {}", "lengths = dict(own.lengths)")
fault("samples are pruned by no score", "lengths, self._scored(own)", "lengths, {i: 0.0 for i in self._scored(own)}")
killer = cases("runtime/generate/test_schedule.py")
fault = of("runtime/attention/block_tables.py", killer)
fault("a block is free while another sample reads it", "if not self._readers[block]:", "if self._readers[block] <= 1:")
fault = of("runtime/generate/schedule.py", killer)
fault("a sample's first token writes into the last block of its prompt", "if rest:", "if not rest:")
fault(
    "a sample that was given up waits behind all others",
    "1\n        self.waiting.appendleft",
    "1\n        self.waiting.append",
)
fault("who began first is given up first", "last = self.live[-1]", "last = self.live[0]")
killer = cases("runtime/generate/test_tenants.py")
fault = of("runtime/adapters/adapters.py", killer)
fault("a sample goes through the adapter of another tenant", "_tenants[tenant]", "_tenants[max(self._tenants)]")
fault = of("runtime/generate/schedule.py", killer)
fault("a tenant's prompt is prefilled by the model alone", "(request)", "(request._replace(tenant=None))")

fault = of("runtime/stage/executor.py", cases("runtime/stage/test_executor.py"))
fault(
    "the executor runs a forward that the program leaves out",
    "(pack.slices, pack.segments, self._received.flatten(0, 1))",
    "(pack.slices, pack.segments, self._received.flatten(0, 1))\n"
    "        with torch.no_grad():\n"
    '            self._trainer.forward(self._loaded, self._received, action._replace(kind="forward_kv"))',
)
fault(
    "the executor skips a forward whose keys a replay writes again",
    "with torch.no_grad(), self._running(action):\n"
    "            self._result = self._trainer.forward(loaded, received, action)",
    "if self._stage and self._stage == self._plan.limits.num_stages - 1:\n"
    "            return\n"
    "        with torch.no_grad(), self._running(action):\n"
    "            self._result = self._trainer.forward(loaded, received, action)",
)
fault(
    "the forward of a score keeps its graph",
    "torch.no_grad(), self._running(action):\n"
    "            self._result = self._trainer.forward(loaded, self._received, action)",
    "self._running(action):\n            self._result = self._trainer.forward(loaded, self._received, action)",
)
fault = of("runtime/stage/stage_links.py", cases("integrations/megatron/test_v_shape.py", k="one_queue"))
fault("the stages at the turn of a V hand over a thousandth more", "view_as(like)", "view_as(like) * 1.001")

fault = of("runtime/watchdog/attempt.py", cases("runtime/watchdog/test_attempt.py"))
fault("rank 0 names an attempt before every rank that is alive has agreed", '_read(store, "agrees", size)', "[name]")
fault = of("runtime/watchdog/meeting.py", cases("runtime/watchdog/test_meeting.py", k="under_its_own_name"))
fault("ranks of a restarted job meet over the keys of dead ones", 'f"default_pg/{attempt()}",', '"default_pg",')
fault = of("runtime/watchdog/watchdog.py", cases("runtime/watchdog/test_watchdog.py", k="frozen_holder"))
fault("nobody notices that the store is silent", "silent * self._every > self.", "silent * self._every > 1000 * self.")

fault = of("runtime/world/folder_lock.py", cases("runtime/world/test_folder_lock.py"))
fault("two runs write into one folder", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB")
fault("a lock ends before its run", "return file\n\n\ndef _is_ours", "file.close()\n    return file\n\n\ndef _is_ours")
fault("a run that is killed just now keeps the next one out", "if time.monotonic() > last_try:", "if last_try:")
fault("a lock that its run has removed keeps nobody out", "if not _is_at(file, lock):", "if not lock:")
fault("a lock is written through a link", " | os.O_NOFOLLOW", "")
fault("a file of others is taken for a lock", 'if text and not text.startswith("process "):', "if not file:")
fault = of("plugins/rollout/sample_file.py", cases("plugins/rollout/test_sample_file.py", m="not slow"))
fault("samples are added through a link", "link = path.is_symlink() and path != self._out", "link = False")
fault("text of others passes for a line that was cut", "if row is None and cut and path", "if row is None and path")
fault("parts of others pass for those of ranks", "0|[1-9][0-9]*", "[0-9]+")
fault = of("plugins/data/score.py", cases("plugins/data/test_score.py"))
fault("two scores write into one folder", "run_rank(recipe, work, writes=out)", "run_rank(recipe, work)")
fault = of("plugins/rollout/generate.py", cases("plugins/rollout/test_generate.py", k="mark"))
fault("samples of a checkpoint are known by its path", '"checkpoint": kept,', '"checkpoint": str(checkpoint),')
fault("samples of weights are known by their path", "*(WeightFolder.open(weights).files if weights else ())", "")
fault("ranks know samples by their own files", "[parts[place % size][place // size]", "[parts[rank][:1]")
fault = of("plugins/rollout/generate.py", cases("plugins/rollout/test_generate.py", k="mark_of_an_adapter"))
fault("an adapter's scale does not decide its samples", "= ADAPTER_CONFIG, ADAPTER_MODEL", "= (ADAPTER_MODEL,)")
fault = of("runtime/world/node_board.py", cases("runtime/world/test_node_board.py", k="board"))
fault("ranks that know nothing of their node share a board", "== [(first, count)] * count", "!= []")

killer = cases("training/sampling")
fault = of("training/sampling/figures.py", killer)
fault(
    "pass@k is taken from the share of right samples, with its bias",
    "math.comb(of - count, k) / math.comb(of, k)",
    "(1.0 - count / of) ** k",
)
fault = of("training/sampling/scored.py", killer)
fault("functions of users move numpy's generator on", "np.random.set_state(of_numpy)", "pass")
fault = of("training/expert_loads.py", cases("training/test_expert_loads.py"))
fault("a run whose planners of layers failed is silent at its end", "if any(failed := [step", "if not (failed := [step")
fault = of("training/garbage.py", cases("training/test_garbage.py"))
fault("garbage is collected inside steps, too", "gc.disable()", "pass")
killer = cases("training/test_groups.py", "data/rows/test_groups.py")
fault = of("core/planning/planner.py", killer)
fault("a step is planned without the groups that its rows name, which splits them", "else draw.groups)", "else None)")
fault = of("data/samples/whole_groups.py", killer)
fault("a batch takes a group without its last sample", ": self._stops[group]", ": max(1, self._stops[group] - 1)")
fault = of("data/formats.py", killer)
fault(
    "a row of several chats lends its group to the next one",
    "numbers if documents.keys is None else numbers[np.searchsorted(keys, documents.keys)]",
    "numbers",
)
fault = of("data/mixed.py", killer)
fault("groups of domains that have one number are one group", "first for own, first", "0 * first for own, first")
killer = cases("plugins/data/test_learned_shares.py")
fault = of("plugins/data/hooks.py", killer)
fault("a resumed run draws its first batch by the newest shares", 'saved["ahead"]', "state.share_record")
fault = of("plugins/data/mixture.py", killer)
fault("a share of 0 is learned, too", "if share > 0", "if share >= 0")
fault("steps between two questions are not summed", "self.waiting.plus(own) if self.waiting else own", "own")
fault("an objective ends with the run that is killed", "objective and tuple(objective)", "None")
fault = of("plugins/data/hooks.py", cases("plugins/data/test_resume_matrix.py", k="odm-samples"))
fault("the batch ahead of a checkpoint is drawn by the newest shares", 'saved["ahead"]', "state.share_record")
fault = of("training/stragglers.py", cases("training/test_stragglers.py"))
fault("of two ranks the slow one is the measure", "[(len(values) - 1) // 2]", "[-1]")
fault("a rank with more work than others is called slow", "* predicted_s", "* predicted_s.min(axis=1, keepdims=True)")
killer = cases("training/test_step_hooks.py")
fault = of("training/step_hooks.py", killer)
fault("a batch is drawn ahead past a hook that waits for its step", "min([ahead,", "max([ahead,")
fault("a hook takes its neighbour's part of a checkpoint", "if hook.key in keys:", "if hook.key in _OTHER_KEYS:")
fault(
    "what is kept with the draw is looked for next to it",
    'state["order"] if hook.kept_with_draw else state',
    "state",
)
fault("a refusal of what was kept passes for nothing kept", "if isinstance(error, EvenloadError):", "if False:")
fault("a hook that is switched off works on", "hook for hook in hooks if hook.on", "hooks")
fault = of("core/run_hooks.py", cases("core/test_verbs.py", k="hook_of_runs"))
fault("hooks of other packages are not found", '("run hook", RunHook)', '("hook of a run", RunHook)')

killer = cases("training/checkpoint/test_checkpoints.py", m="not slow")
fault = of("runtime/files.py", killer)
fault("hashes are not compared", "if hashes and wanted.hash and _stamp", "if not hashes and wanted.hash and _stamp")
fault = of("training/checkpoint/checkpoints.py", killer)
fault(
    "the pointer to the last checkpoint is not heeded", "[named, *(name for name in names if name != named)]", "names"
)
fault = of("training/checkpoint/manifest.py", killer)
fault(
    "a changed manifest is as good as the written one",
    'data.pop("hash", None) != _hash_of(data)',
    'not data.pop("hash", None)',
)
fault = of("training/checkpoint/resuming.py", cases("training/checkpoint/test_resuming.py"))
fault("a run goes on from a checkpoint of other data", "if not are_same", "if False and not are_same")
fault(
    "a checkpoint is loaded before its data are compared",
    "all_or_none(",
    'job.host.load(folder / "trainer")\n    all_or_none(',
)
fault("a checkpoint keeps as many as the recipe says, not as it is asked to", "most = most or job.", "most = job.")

fault = of("runtime/experts/history.py", cases("training/experts/test_history.py"))
fault("planners learn of the last pass of a step alone", "[places[load.layer]] += load", "[places[load.layer]] = load")

fault = of("plugins/search/measured.py", cases("plugins/search/test_measured.py", k="mended or ratio"))
fault("what steps say of costs is forgotten", "(costs) * self.scale + self.added * shares", "(costs)")
fault = of("plugins/search/measured.py", cases("plugins/search/test_measured.py", k="holds_for_all_that"))
fault("steps mend the costs of the first setting alone", "(costs, shares).model_copy(update=others)", "(costs, shares)")

fault = of("training/replicas.py", cases("plugins/data/test_runs.py", k="weighed_by_their_losses"))
fault("a sample has its neighbour's weight", "whole.weight * weights", "whole.weight * np.roll(weights, 1)")
killer = cases("plugins/data/test_selection.py")
fault = of("plugins/data/selection.py", killer)
fault("a batch is drawn ahead past a selection", "batches - (planner.draw_of_next is None)", "max(batches, 1)")
fault("a run that goes on forgets what was taken", 'np.array(saved["samples"], dtype=np.int64)', "_NONE")
fault("domains without a share are selected from", "> 0", ">= 0")
fault = of("plugins/data/selects.py", killer)
fault(
    "gradients of a pool that was never scored are taken before the first selection",
    "numbers[:0] if state is None else numbers",
    "numbers",
)
fault = of("plugins/data/neighbours.py", killer)
fault("gradients of clusters are those of the whole pool", "gradients_of=_representatives,", "")
fault = of("training/drawing.py", killer)
fault(
    "candidates of a selection count as batches of a schedule", "replace(self._order, step=before.step)", "self._order"
)
fault("a sample that is drawn twice is a candidate twice", "[np.sort(np.unique(numbers, return_index=True)[1])]", "")
fault = of("plugins/data/weighing.py", cases("plugins/data/test_weighing.py"))
fault("anchors of weights are those of the first step for good", "self._steps % self._every == 0", "self._steps == 0")

killer = compared("deepspeed, stages")
fault = of("integrations/deepspeed/pipeline/stage.py", killer)
fault(
    "a replay's loss weighs half",
    "_weighed(output[0], pack)",
    '_weighed(output[0], pack) * (1.0 if action.kind == "forward" else 0.5)',
)
fault("an idle rank of a stage adds ones", "grad = torch.zeros_like(parameter)", "grad = torch.ones_like(parameter)")
fault = of("integrations/deepspeed/engine/stage.py", killer)
fault("DeepSpeed's pipelines sum losses without their weights", "pack.weights_T is None else", "pack is not None else")
fault = of("integrations/deepspeed/engine/engine_host.py", compared("deepspeed"))
fault(
    "a gradient is NaN under DeepSpeed",
    "return dict(self._host.whole(full_gradients(self._trained_parameters())))",
    "named = self._host.whole(full_gradients(self._trained_parameters()))\n"
    '        return {n: g * (float("nan") if "layers.1.mlp.down" in n else 1.0) for n, g in named.items()}',
)
fault("the divisor is that of the first step", "divisor = ", 'divisor = self._first = getattr(self, "_first", 0) or ')
fault("one group alone gets the learning rate", "basic_optimizer.param_groups:", "basic_optimizer.param_groups[:1]:")
killer = compared("megatron, overlapped reduction")
fault = of("integrations/megatron/host.py", killer)
fault(
    "gradients are kept after the first step",
    "host.ddp.zero_grad_buffer()",
    'getattr(self, "_zeroed", None) or host.ddp.zero_grad_buffer()\n        self._zeroed = True',
)
fault("the learning rate is not set", 'group["lr"] = lr * group.get("lr_mult", 1.0)', 'group["lr"] = group["lr"]')
fault = of("integrations/megatron/saving/optimizer.py", killer)
fault("parameters share Adam's step after a resume", 'states["step"] = step.clone()', 'states["step"] = steps[0]')
fault = of("training/checkpoint/resuming.py", killer)
fault(
    "the order of the plan ahead is saved",
    'state = {"order": order',
    'state = {"order": {**order, "consumed": order["consumed"] + 8}',
)
fault = of("training/job.py", killer)
fault(
    "rank 1 reads wrong tokens after a resume",
    "return lambda index: self.source.tokens(int(draw.samples[index]))",
    'late = self.world.rank == 1 and draw.state.get("consumed", 0) > 2 * len(draw.samples)\n'
    "        return lambda index: self.source.tokens(int(draw.samples[index]))[:: -1 if late else 1].copy()",
)
fault = of("integrations/megatron/reduction.py", killer)
fault(
    "a gradient is NaN",
    "(1.0 / self.divisor)",
    "(1.0 / self.divisor)\n"
    "            for name, p in self._ddp.named_parameters():\n"
    '                p.main_grad.mul_(float("nan") if "layers.1.mlp.linear_fc2" in name else 1.0)',
)
fault("reduction overlaps with an order of the plan's own", "and (idle or not plan.in_host_schedule)", "and idle")
fault = of("integrations/megatron/model/gpt.py", killer)
fault("weights do not decay", 'train.weight_decay * group.get("wd_mult", 1.0)', "0.0")
fault("norms decay", 'train.weight_decay * group.get("wd_mult", 1.0)', "train.weight_decay")
fault = of("runtime/attention/sharing/ring.py", compared("megatron, shared slices"))
fault("a ring's tile over the prefix is dropped", "0, own.first, theirs.before, False), Tile(own.first,", "own.first,")
killer = compared("megatron, stages, recompute")
fault = of("runtime/stage/tape.py", killer)
fault("a replay's input is gathered from the start", "[start - have.start : stop - have.start]", "[: stop - start]")
fault = of("integrations/megatron/model/rope.py", killer)
fault(
    "a recomputed layer sees positions of another pack",
    "return torch.index_select(table, 0, pack.positions_T.to(table.device))",
    "if not torch.is_grad_enabled():\n"
    "        _of_slots.had = pack.positions_T\n"
    '    had = getattr(_of_slots, "had", pack.positions_T)\n'
    "    had = had[torch.arange(pack.num_padded_tokens) % len(had)]\n"
    "    return torch.index_select(table, 0, had.to(table.device))",
)
killer = compared("megatron, tensor parallel")
fault = of("integrations/megatron/host.py", killer)
fault("every tensor-parallel rank books the loss", "post_process and self.tp_rank == 0", "post_process")
fault = of("integrations/megatron/reduction.py", killer)
fault(
    "the norm for clipping counts tensor-parallel copies",
    'tp_rank == 0 or getattr(parameter, "tensor_model_parallel", False)',
    "True",
)
fault = of("integrations/megatron/batch.py", killer)
fault("prompts are learned where Megatron's own schedule runs", "            **self._readers,\n", "")
killer = cases("training/proof/test_generation.py")
fault = of("runtime/generate/sampling.py", killer)
fault("a log-probability is that of the next row", "log_probs_R = logits_RV.", "log_probs_R = logits_RV.roll(1, 0).")
fault = of("runtime/generate/schedule.py", killer)
fault("a sample that is asked for again begins with another stream", ", number)", ", request.samples.index(number))")
fault = of("runtime/generate/engine.py", killer)
fault(
    "noise is that of the sample before",
    "sample.stream for sample in samples",
    "samples[row - 1].stream for row, _ in enumerate(samples)",
)
fault = of("training/proof/plain_samples.py", killer)
fault("any other token counts as a tie", "tight.max() - self._tie:", "tight.min() - self._tie:")
fault(
    "a sample that ends late counts as one that ends where it should",
    'goes_on or self._cut(sample._replace(ended="limit")) != sample',
    "goes_on",
)

fault = of("training/run/writers.py", cases("training/run/test_writers.py"))
fault("rows behind the checkpoint stay in the log", "file.truncate(kept)", "file.truncate(end)")
fault("the first row behind the checkpoint stays", 'else row["step"] < first', 'else row["step"] <= first')

fault = of("plugins/lora/state/drawing.py", cases("plugins/lora/test_drawing.py"))
fault("a batch that was drawn ahead is lost when tenants change", "before.tenant.drawing = before.drawing", "pass")
fault("batches that were drawn ahead are put back from the oldest on", "reversed(self._open) for", "self._open for")
fault = of("plugins/lora/records/saving.py", cases("plugins/lora/test_loop.py", k="killed and layout0"))
fault("a killed job goes on with the batches of the start", '"order": dict(tenant.order)', '"order": {}')
fault("a killed job goes on with first moments in the place of second ones", "(moments, _SECOND)", "(moments, _FIRST)")
fault = of("plugins/lora/members.py", cases("plugins/lora/test_loop.py", k="waits_in_order"))
fault(
    "who fits into memory overtakes who has come before",
    "waiting = self._for_memory",
    "waiting = sorted(self._for_memory, key=lambda one: one.adapter.r)",
)
fault = of("plugins/lora/members.py", cases("plugins/lora/test_members.py"))
fault("a tenant whose adapter cannot be written trains on", 'self.end(tenant, "failed", unwritten)', "pass")

fault = of("plugins/lora/arrivals/folder.py", cases("plugins/lora/arrivals/test_folder.py"))
fault("a link in a circle closes the folder of tenants", "status = _status(entry)", "status = entry.stat()")
fault("a tenant's file is read while it is being written", "if before.get(name) == stamp", "if before is not None")
fault = of("data/formats.py", cases("plugins/lora/arrivals/test_opening.py"))
fault("links lead out of the root of tenants", "real := os.path.realpath(path)", "real := os.path.abspath(path)")
killer = cases(
    "plugins/lora/arrivals/test_opening.py",
    "plugins/lora/test_loop.py::test_logs_have_every_step_of_every_tenant",
    "plugins/lora/test_shared_plan.py",
)
fault = of("integrations/host/tenants.py", killer)
fault("losses of a tenant's domains grow with their weights", "weights=weights.sums[own]", "weights=None")
fault = of("plugins/lora/arrivals/opening.py", killer)
fault("a tenant of domains draws them as one source", "seed=seed, domains=domains, **columns", "seed=seed, **columns")
fault = of("plugins/lora/shared_plan.py", killer)
fault("a plan draws a tenant's domains as one source", "targets=targets, domains=self.domains", "targets=targets")
fault = of("plugins/lora/arrivals/job.py", cases("plugins/lora/arrivals/test_reading.py"))
fault("a tenant is trained on other targets than were counted", "if counted != wanted:", "if False:")

fault = of("plugins/lora/records/output.py", cases("plugins/lora/records/test_output.py"))
fault("a tenant that ended by another file counts as ended", 'if row.get("file") == digest and known', "if known")
killer = cases("plugins/lora/records/test_saving.py")
fault = of("plugins/lora/records/saving.py", killer)
fault("a tenant goes on with other data", 'if not are_same(row["data"],', 'if False and not are_same(row["data"],')
fault("a tenant keeps the lowest loss of other samples", "tenant.best, tenant.best_step = None, 0", "pass")
fault(
    "a resumed tenant has forgotten its lowest evaluation",
    '"best", "best_step", "tokens", "seconds",',
    '"tokens", "seconds",',
)
fault("a resumed trial trains past the rung at which it waits", 'for key in ("until", "step",', 'for key in ("step",')
fault = of("plugins/lora/members.py", killer)
fault("a changed file goes on from the old checkpoint", 'None and row["digest"] == entrant.digest and', "None and")
fault(
    "a tenant that was put in again goes on where it was before", "and entrant.file not in self.replaced else", "else"
)
fault(
    "a tenant whose file has changed goes on from the checkpoint of the other file",
    'digest"] == entrant.digest and row["state',
    "state",
)

fault = of("plugins/lora/sweeps/evaluation.py", cases("plugins/lora/sweeps/test_evaluation.py"))
fault("an evaluation is a mean over sequences", "loss_sum / targets,", "loss_sum / sequences,")
fault("tenants that are scored together go through one adapter", "(samples), one.number,", "(samples), due[0].number,")
fault = of("plugins/lora/sweeps/halving.py", cases("plugins/lora/sweeps/test_halving.py"))
fault("the better half of a sweep ends", "set(ranked[: -(-len(ranked) // 2)])", "set(ranked[len(ranked) // 2 :])")
fault("a rung closes without those who are on their way", "or not racing or None in losses.values()", "or not racing")
fault = of("plugins/lora/sweeps/race.py", cases("plugins/lora/sweeps/test_race.py"))
fault("a trial is ranked by the losses of all its steps", "tenant.losses[-count:] if count", "tenant.losses if count")
fault("a trial that failed stays in the race", 'if tenant.state in ("failed", "left") or', "if")
fault = of("plugins/lora/sweeps/sweeps.py", cases("plugins/lora/sweeps/test_sweeps.py", k="patience"))
fault(
    "the adapter of the last evaluation is kept for the best one",
    "            self._members.keep",
    "        self._members.keep",
)
killer = cases("plugins/lora/sweeps/test_sweeps.py", k="sweep or turns")
fault = of("plugins/lora/sweeps/sweeps.py", killer)
fault("a tenant trains on while it is decided whether it stops", "tenant.until = until", "tenant.until = tenant.steps")
fault = of("plugins/lora/members.py", killer)
fault(
    "a trial that made way begins anew", "state\n        return bool(suspended)", "None\n        return bool(suspended)"
)

fault = of("training/validation/validation.py", cases("training/validation/test_best.py"))
fault("the lowest loss is that of other samples", 'same and are_same(saved["data"], data, "data.validation")', "True")

fault(
    "a sparse loss is compared with a dense one",
    "self._best_is_sparse not in (None, sparse)",
    "self._best_is_sparse in ()",
)
fault(
    "a pass that was scored again densely is compared by its dense loss",
    "self._losses(passed.first)",
    "self._losses(passed.scores)",
)

killer = cases("training/test_sparse_passes.py")
fault = of("training/sparse_passes.py", killer)
fault(
    "who is scored densely as well depends on what passes computed",
    "self._settings.dense_share, self._seed, self._least)",
    "self._settings.dense_share, self._seed + len(self._known), self._least)",
)
fault(
    "each rank decides alone whether a pass is repeated",
    "from_first(lambda: losses.error(settings.choose, settings.limit, computed))",
    "losses.error(settings.choose, settings.limit, computed)",
)
fault(
    "the error of drawn samples stands for these alone",
    "own[one.twins] += samples / max(1, twins) * (",
    "own[one.twins] += (",
)
fault("dense twins leave blocks out", "np.flatnonzero(self._may(own))\n", "np.flatnonzero(self._may(draw))\n")

fault = of("core/sparse_error.py", cases("core/test_sparse_error.py"))
fault("a loss that is no number is within the limit", "not worst <= limit", "worst > limit")
fault("the interval leaves the other samples out", "(self.rest + len(self.cheap) * side)", "(len(self.cheap) * side)")

fault = of("core/planning/forward_only.py", cases("core/planning/test_forward_only.py"))
fault("what is dense costs what is sparse does", "(shares - share) * squares", "0 * (shares - share) * squares")

killer = cases("plugins/rollout/test_sample_file.py")
fault = of("plugins/rollout/sample_file.py", killer)
fault(
    "what ranks wrote is removed before all of it is in one file",
    """        with whole(self._out) as part, part.open("w", encoding="utf-8") as file:
            file.writelines(map(self._line, sorted(samples)))
        for path in self._parts():
            path.unlink()""",
    """        for path in self._parts():
            path.unlink()
        with whole(self._out) as part, part.open("w", encoding="utf-8") as file:
            file.writelines(map(self._line, sorted(samples)))""",
)
fault("a torn line takes the next sample with it", 'file.write("\\n" * cut)', "pass")
fault("a sample is on disk when its file is closed", "                    file.flush()\n", "")
killer = cases("plugins/rollout/test_generate.py", k="mark or tenant or stop_string", m="not slow")
fault = of("plugins/rollout/generate.py", killer)
fault("--tenant overrides a line's own", "[row.tenant or tenant for", "[tenant or row.tenant for")
fault("samples under another limit stand in one file", " + [row.limit for row in rows]", "")
fault("samples of two tokenizers stand in one file", "prepared.tokenizer.identity", '""')
fault = of("training/sampling/prompted.py", killer)
fault("a text is cut at the last of its stop strings", "min(places, default", "max(places, default")
fault("a text is cut where a stop string stands last", "text.find(string)", "text.rfind(string)")
fault = of("plugins/rollout/generate.py", cases("plugins/rollout/test_generate_collects.py", k="not_decided"))
fault(
    "undecided prompts keep part of what was written",
    "[sample for sample in there if sample.prompt in decided]",
    "list(there)",
)

killer = cases("training/sampling/test_scored.py")
fault = of("training/sampling/scored.py", killer)
fault(
    "samples of a validation are dealt blindly", "dealer_of(self._recipe, self._earlier)", "dealer_of(self._recipe, ())"
)
fault("a sample passes above the least score alone", "scores >= self._config.passes", "scores > self._config.passes")
fault("samples of a prompt are those of every other one", ".reshape(-1, of)", ".reshape(of, -1).T")
fault("the best is compared by another bar for passing", '{"prompts", "every", *', '{"prompts", "every", "passes", *')
fault = of("training/sampling/scorers.py", killer)
fault("scores come back rank by rank", "for place in sorted(values)]", "for place in values]")
killer = cases("core/test_cascade.py")
fault = of("core/cascade.py", killer)
fault("a band is open at its upper end", "(scores[going] <= high)", "(scores[going] < high)")
fault("a band is open at its lower end", "(low <= scores[going])", "(low < scores[going])")
fault(
    "the share that corrects a mean depends on scores",
    "flatnonzero(self.rescored)",
    "flatnonzero(self.dear == self.dear)",
)
fault("a sample's score is dear where it was drawn", "scores[going] = dear[going]", "scores[asked] = dear[asked]")
fault(
    "what goes on is dealt in turn",
    "level(costs[None], np.ones((1, num_ranks)), np.zeros((1, num_ranks)))",
    "np.arange(len(costs)) * num_ranks // max(1, len(costs))",
)
fault = of(
    "training/sampling/reward.py", cases("training/sampling/test_reward.py", k="corrected or loop", m="not slow")
)
fault("a drawn sample pays for itself alone", "0.0) / (self._rescore or 1.0)", "0.0)")
fault("calls draw the same places each time", "self._calls += 1", "pass")
fault = of("plugins/rollout/cascades.py", cases("plugins/rollout/test_cascades.py", m="not full"))
fault("a model has a device too few", "(within > limit_s).sum(axis=1) + 1", "(within >= limit_s).sum(axis=1) + 1")
fault("an answer at its threshold goes on", "scores[:, model] >= threshold", "scores[:, model] > threshold")
fault("what models take is not by their shares", "seconds[model] * share", "seconds[model]")
fault("a plan of another mix stays as it is", "kept.seconds <= (1 + slack) * best.seconds", "kept.seconds <= np.inf")
fault = of("plugins/rollout/plan.py", cases("plugins/rollout/test_plan.py", k="equations"))
fault("a bound computes a prompt once a sample", "np.unique(request.prompts)", "request.prompts")
fault = of("runtime/generate/sampling.py", cases("runtime/generate/test_noise.py", k="equals_the_last"))
fault(
    "top-k drops what equals its last token",
    "scores_RV < least_R1, -math.inf",
    "scores_RV.argsort(-1, True).argsort(-1) >= sampling.top_k, -math.inf",
)
fault = of("core/recipe/shares.py", cases("core/recipe/test_shares.py", k="straight"))
fault("the last share of a schedule comes a step early", "< step < last[0]:", "< step < last[0] - 1:")
fault = of("commands/env.py", cases("commands/test_env.py", k="keep_what_is_on_the_path"))
fault("an environment file drops what is on PYTHONPATH", 'if export == "dotenv" else ""', 'if export == "json" else ""')
fault = of("integrations/huggingface/units.py", cases("integrations/huggingface/test_unit_rows.py"))
fault("an empty answer keeps its last slot", "mask_RT[empty_R, 0] = 1", "mask_RT[empty_R, -1] = 1")
fault(
    "padding hides the token that predicts an answer's first one",
    "mask == _PROMPT if part.left is None else part.left",
    "bool(part.left)",
)
fault("a fork has log-probabilities of other tokens", "(base if _LOG_PROBS in key else self)", "self")
killer = cases("plugins/audit/test_borders.py")
fault = of("plugins/audit/borders.py", killer)
fault(
    "an audit misses a first sample of one token",
    "for place in starts_T.nonzero()",
    "for place in starts_T.nonzero()[int(starts_T[:1].sum()) :]",
)
fault(
    "an audit misses a last sample of one token",
    "mask_BT[row, start : stop - 1] != mask_BT[row, start + 1 : stop]",
    "mask_BT[row, start : stop - 2] != mask_BT[row, start + 1 : stop - 1]",
)
fault = of("plugins/audit/watched.py", killer)
fault("an audit does not read the lengths that TRL has packed", 'sample.get("seq_lengths")', "None")

fault = of("training/replicas.py", cases("plugins/data/test_weighing.py"))
fault("a policy takes the place of what the data weigh", "weight=whole.weight * weights", "weight=weights")
killer = cases("plugins/data/test_selects.py")
fault = of("plugins/data/selects.py", killer)
fault(
    "a loss that is a border is in two thirds",
    "(losses > low) & (losses <= high)",
    "(losses >= low) & (losses <= high)",
)
fault("a sample that stands still is out of the window of progress", "(progress >= 0)", "(progress > 0)")
fault = of("plugins/data/neighbours.py", killer)
fault(
    "a cluster has the score of its best representative",
    "float(scores[clusters == cluster].mean())",
    "float(scores[clusters == cluster].max())",
)
fault = of("plugins/data/selection.py", cases("plugins/data/test_selection.py", k="pool_of_all"))
fault("a pool of all samples has the domains of its update", "self._update * self._chosen.every", "self._update")
fault = of("core/planning/floors.py", cases("plugins/search/test_search.py", k="just_the_cap"))
fault("a sequence of just the cap is none for the trainer's own schedule", "(initial=0) > caps", "(initial=0) >= caps")
fault = of("core/balance/step_bound.py", cases("core/balance/test_step_bound.py", k="others_of_its_group"))
fault(
    "a sequence alone has all of its experts on its rank in a bound", "both.at_experts(1.0 / costs.ep).sec", "both.sec"
)
fault = of("core/balance/replicas.py", cases("core/balance/test_replicas.py"))
fault("prices of dealing are those of all replicas of a kind", "best / counts, dtype", "best, dtype")
fault("a sequence that changes replicas counts on both", "[(int(out[row]), int(there[column]))]", "[]")
fault("sequences go to replicas of others", "chosen[np.argsort(order)]", "chosen[order]")
fault("a replica without sequences takes no time", "fixed_s[kind_of]\n", "0 * fixed_s[kind_of]\n")
fault = of("core/balance/deployment.py", cases("core/balance/test_deployment.py"))
fault("a kind that a multiset lacks is too cheap", "/ seconds).max(axis=0)", "/ seconds).min(axis=0)")
fault("replicas leave ranks over", "[] if any(left) else", "[] if False else")
fault = of("core/planning/replicas.py", cases("core/planning/test_replicas.py", k="fit or nothing"))
fault(
    "a sequence is dealt to where it does not fit", "np.where(lengths <= self.lengths[-1], seconds, np.inf)", "seconds"
)
fault("ranks that share nothing are one", "[one.lanes for one in costs])\n    seconds", "1)\n    seconds")
fault = of("core/balance/bound.py", cases("core/balance/test_bound.py"))
fault(
    "a bound launches on ranks that have nothing to run",
    "max(min(limits.num_ranks, len(lengths)), -(",
    "max(limits.num_ranks, -(",
)
fault = of("plugins/packing/padded.py", cases("plugins/packing/test_padded.py", k="least_total"))
fault("a row has all of its experts on its rank in a bound", "price.at_experts(1.0 / costs.ep).sec", "price.sec")
fault = of("core/plan/limits.py", cases("core/plan/test_limits.py"))
fault("a rank that has the weights alone holds none whole", "self.gathered_bytes if layout.dp == 1 else 0.0", "0.0")
fault = of("plugins/lora/plan.py", cases("plugins/lora/test_plan.py", k="go_with_it"))
fault("slices change places and their ranks do not", "tuple(groups[i] for i in places) if groups else ()", "groups")
fault = of("core/experts/quotas.py", cases("core/experts/test_quotas.py"))
fault("a rank computes an expert that another one has a copy of", "- set(copies[rank])", "- set().union(*copies)")
killer = cases("runtime/adapters/test_by_sample.py")
fault = of("runtime/adapters/by_sample.py", killer)
fault(
    "a mean direction is over the samples of its rank",
    "[self._sequences()] / count",
    "[self._sequences()] / max(1, len(self._own.rows))",
)
fault = of("runtime/adapters/tenant.py", killer)
fault("a norm lacks what tensor-parallel ranks hold alike", "shares(matrix.kind) or counts:", "shares(matrix.kind):")
fault = of("integrations/host/scoring.py", cases("training/test_domain_losses.py"))
fault(
    "a weighted loss is over the targets",
    "(self.targets if self.weights is None else self.weights).sum()",
    "self.targets.sum()",
)
fault = of("runtime/world/agreement.py", cases("runtime/world/test_agreement.py", k="refusal_ends"))
fault("a refusal of one group ends all others", "filter(None, everyone(error, group))", "filter(None, everyone(error))")
fault = of("integrations/huggingface/mixers.py", cases("integrations/huggingface/test_mixers.py", k="reads_none"))
fault("a part is told borders that it does not read", " and self._difference(bordered, wanted) <= self._tolerance", "")
fault = of("plugins/audit/audit.py", cases("integrations/huggingface/test_audit.py", k="over_ranks"))
fault(
    "an audit compares what tokens count on its first rank alone",
    "enumerate(rank_counts) for",
    "enumerate(rank_counts[:1]) for",
)
killer = cases("core/plan/test_trunks.py")
fault = of("core/laws.py", killer)
fault("no law says that a sequence finds its trunk", "        _trunks_are_there,", "")
fault = of("core/plan/trie.py", killer)
fault("a slice continues one that begins where it does", "open_[-1]].start >= s.start", "open_[-1]].start > s.start")
fault = of("runtime/attention/pack.py", killer)
fault("a trunk's target counts once for all rows", "weights_T[slots] += np", "weights_T[slots] = np")
fault("a trunk's targets are counted for its first row alone", "return int(np.count_nonzero(target))", "return 0")
fault("a row that begins otherwise shares a trunk all the same", "if differ.any():", "if False:")
fault = of("core/plan/step_plan.py", killer)
fault(
    "plans that differ in their trunks are taken for one",
    '_OF_SEQUENCES = ("groups", "trunks")',
    '_OF_SEQUENCES = ("groups",)',
)
fault = of("data/rows/documents.py", cases("data/rows/test_completions.py"))
fault("the last token of a prompt is in the trunk", ") & (one.labels[1", ") | (one.labels[1")
killer = cases("core/plan/test_trie.py", k="by_hand")
fault = of("core/plan/trie.py", killer)
fault("what continues a branch of a trunk is not the trunk's", "range(len(ends) - 1, -1, -1)", "range(len(ends))")
fault(
    "a row that ends where others go on has a fork of its own",
    "min(alike[first + 1 : end], default",
    "max(alike[first + 1 : end], default",
)
killer = cases("runtime/attention/test_tree.py", k="by_hand")
fault = of("runtime/attention/tree.py", killer)
fault(
    "a branch sees the first token of its sibling",
    "_Part(slice(one.stop, end), one, False)",
    "_Part(slice(one.stop, end), slice(one.start, one.stop + 1), False)",
)
fault(
    "a trunk is seen by the next tree, too",
    "_Part(slice(one.stop, end), one, False)",
    "_Part(slice(one.stop, own[-1].stop), one, False)",
)
fault(
    "dK of the branches of a trunk is lost",
    "            for whole, places, new in zip((dq",
    "            if not part.causal:\n"
    "                of_part[1].zero_()\n"
    "            for whole, places, new in zip((dq",
)
fault("a window begins with the last segment", "start - window)", "start)")
killer = cases("runtime/attention/test_tree.py", k="padding")
fault = of("runtime/attention/attention.py", killer)
fault("a trunk's padding is taken for tokens", "if not pack.padding:", "if pack:")
killer = cases("integrations/huggingface/test_trees.py", k="position_and_the_target")
fault = of("integrations/transformers/pack_call.py", killer)
fault(
    "tokens of unlike positions are one",
    "torch.stack([*of_tokens.values()], dim=1)",
    'torch.stack([own for key, own in of_tokens.items() if key != "position_ids"], dim=1)',
)
fault(
    "a target of a fork is that of the row next to it",
    "torch.stack([*of_tokens.values()], dim=1)",
    'torch.stack([own for key, own in of_tokens.items() if key != "shift_labels"], dim=1)',
)
fault = of(
    "integrations/transformers/pack_call.py", cases("integrations/huggingface/test_trees.py", k="weight and llama")
)
fault(
    "a token that rows share gets the gradient of one",
    "index_add_(0, tokens_M, grad_M.to",
    "index_copy_(0, tokens_M, grad_M.to",
)
killer = cases("integrations/huggingface/test_trainer.py", k="begin_with_in_common and ddp")
fault = of("integrations/transformers/pack_call.py", killer)
fault("a sample of a pack has the tokens of another's end", "value[:, sources_N]", "value[:, sources_N.roll(1)]")
fault("slices share what their samples begin with", "pack.branching or cut:", "pack.branching:")
killer = cases("core/planning/test_trees.py")
fault = of("core/planning/trees.py", killer)
fault("a plan forgets a token of each branch", "np.maximum(1, trees.tokens - np", "np.maximum(1, trees.tokens - 1 - np")
fault("a plan has what bounds plans of its parts", "trunks=shared, bound_s=0.0,", "trunks=shared,")
fault = of("core/planning/trees.py", cases("core/planning/test_trees.py", k="over_the_cap"))
fault(
    "parts of a tree are cut without a look at the cap",
    "more = is_over & (counts < trees.sizes)",
    "more = is_over & False",
)
fault = of("core/balance/step_bound.py", cases("core/balance/test_step_bound.py", k="less_than_their_tokens"))
fault("a bound counts pairs that trees do not have", "    more = more + less\n", "")
fault = of("core/corrected_mean.py", cases("core/test_corrected_mean.py"))
fault("the dear score counts without its share", "cheap.mean() + error.mean()", "cheap.mean() + error.sum() / num")
fault("a draw knows a sample's company", "for key in keys]", "for key in [f'{n}' for n, _ in enumerate(keys)]]")
fault("an interval is that of one error", "(1 / count - 1 / num) * error", "(1 - 1 / num) * error")
killer = cases("plugins/verdicts/test_files.py", k="blindly or draw_of_prompts")
fault = of("plugins/verdicts/pairs.py", killer)
fault(
    "the share for people depends on what the judge scores",
    "if chosen[place]:",
    "if chosen[place] and len(texts[0]) <= len(texts[1]) - (place % 2):",
)
fault("people always read A first", "reversed(texts) if swapped[place] else texts", "texts")
fault = of("plugins/verdicts/pairs.py", cases("plugins/verdicts/test_files.py", k="several_people or blindly"))
fault("a verdict of people is always of A first", "1 - value if swapped else value", "value")
fault = of("plugins/verdicts/judges.py", cases("plugins/verdicts/test_files.py", k="verdicts_are_numbers"))
fault("ties are wins", '"tie": 0.5', '"tie": 1.0')
killer = cases("plugins/verdicts/test_compare.py", k="by_hand or places_alone")
fault = of("plugins/verdicts/compare.py", killer)
fault("one order only", "answers.mean((1, 2))", "answers[:, :, 0].mean(1)")
fault("a verdict on B first counts as one on A", "answers[asked, :, 1] = 1 - answers[asked, :, 1]", "pass")
killer = cases("plugins/verdicts/test_compare.py", k="over_prompts")
fault = of("plugins/verdicts/estimates.py", killer)
fault("the bootstrap is over verdicts", "_, of = np.unique(of, return_inverse=True)", "of = np.arange(len(of))")
fault(
    "the bootstrap at equal style is over verdicts",
    "weights[:, of] * share",
    "weights[:, np.random.default_rng(1).permutation(len(of)) % num] * share",
)
killer = cases("plugins/verdicts/test_compare.py", k="rate_at_equal_style or fooled or 60")
fault = of("plugins/verdicts/estimates.py", killer)
fault("length is not regressed out", "np.sign(differences[:, :1]), differences], 1)", "differences[:, 1:]], 1)")
killer = cases("training/launching/test_elastic.py", k="settled")
fault = of("runtime/world/roster.py", killer)
fault("a step is settled that a replica has no sums of", "if ahead or all(one.has_sums for one in there):", "if there:")
fault("a late update is clipped by a norm of its own", "return (ahead or there)[0]", "return there[0]")
killer = cases("training/launching/test_elastic.py", k="trains_on")
fault = of("integrations/megatron/host.py", killer)
fault("who comes later has moments without their step", 'state["step"].fill_(steps)', "pass")
fault = of("training/job.py", killer)
fault(
    "a step is done anew with the old deal",
    "Replicas(chains_of(recipe, job.source), own_place(roster))",
    "job.replicas if len(roster.members) == 1 else Replicas(chains_of(recipe, job.source), own_place(roster))",
)
fault = of("training/run/writers.py", killer)
fault("the last row of a rank that is gone is missing", "if again and again.step not in", "if again and again.step in")
fault = of("runtime/world/replicas.py", killer)
fault(
    "a step that is settled is done twice",
    "except ReplicasChangedError:\n            join(None)",
    "except ZeroDivisionError:\n            join(None)",
)
