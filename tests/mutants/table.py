"""Planted faults, and what must notice them.

Each is a fault that a person could make: one piece of the code replaced by another, wrong one. ``killer`` names the
command of `KILLERS` that must fail where the fault is planted, and pass where it is not. Quick ones die in
`make check`: their killer is a run of tests/commands/proof/test_compare.py.
"""

from __future__ import annotations

from typing import NamedTuple

Words = tuple[str, ...]


class Mutant(NamedTuple):
    """A planted fault."""

    name: str
    file: str
    old: str
    """Stands once in the file."""
    new: str
    killer: str


_TINY = ("model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=4", "model.num_query_groups=2")
_SMALL = (*_TINY, "data.max_length=512", "train.global_batch_size=8")
_DEEP = ("model.num_layers=4", *_SMALL[1:])
_CUT = ("plugins.packing.max_tokens=128",)
_EXACT = ("train.dtype=fp64",)


def _verify(recipe: str, *words: str) -> Words:
    return ("verify", f"recipes/{recipe}.yaml", *words)


def _quick(run: str) -> Words:
    return ("pytest", f"tests/commands/proof/test_compare.py::test_a_small_run_is_exact[{run}]")


_PACKED = "tests/integrations/megatron/unmodified/test_packed.py"
_FORMS = "integrations/megatron/unmodified/forms/"
_TENANTS = "tests/integrations/megatron/test_tenants.py::test_three_steps_move_adapters_as_a_textbook_does"
_FROZEN = "tests/integrations/deepspeed/test_tenants.py"
_TRAINER = "tests/integrations/huggingface/test_trainer.py"
_TRAINER_STAGE = "integrations/huggingface/stage.py"
_TRAINER_STEP = "integrations/huggingface/trainer.py"

_SPEC = "tests/integrations/megatron/unmodified/test_transformer_engine.py"

KILLERS: dict[str, Words] = {
    "quick overlap": _quick("megatron, overlapped reduction"),
    "quick tensor parallel": _quick("megatron, tensor parallel"),
    "quick stages": _quick("megatron, stages, recompute"),
    "quick shared": _quick("megatron, shared slices"),
    "quick deepspeed": _quick("deepspeed"),
    "quick deepspeed stages": _quick("deepspeed, stages"),
    "slices": _verify("slices", *_SMALL, *_EXACT, *_CUT),
    "slices bf16": _verify("slices", *_SMALL, *_CUT, "train.dtype=bf16"),
    "packs": _verify("quickstart", *_SMALL, *_EXACT, "plugins.packing.max_tokens=1024"),
    "long": _verify("quickstart", *_SMALL, *_EXACT, "plugins.packing.max_tokens=1024", "--steps", "8"),
    "weight passes": _verify("pipeline", *_DEEP, *_EXACT),
    "weight passes, biases": _verify("pipeline", *_DEEP, *_EXACT, "model.family=gpt"),
    "weight passes, tensor parallel": _verify("pipeline", *_DEEP, *_EXACT, "parallel.tp=2"),
    "stages": _verify("pipeline", *_SMALL, *_EXACT),
    "mesh": _verify("mesh", *_SMALL, *_EXACT, "plugins.mesh.max_tokens=160"),
    "mesh one key head": _verify("mesh", *_TINY[:3], "model.num_query_groups=1", *_SMALL[4:], *_EXACT)
    + ("plugins.mesh.max_tokens=160", "plugins.mesh.engines=all_to_all"),
    "mesh three ranks": _verify("mesh", *_SMALL, *_EXACT, "parallel.dp=3", "plugins.mesh.max_tokens=200")
    + ("model.num_attention_heads=8",)
    + ("plugins.mesh.engines=all_to_all",),
    "zero 3": _verify("deepspeed", *_SMALL, "plugins.packing.max_tokens=256", "deepspeed.zero_stage=3"),
    "divided experts": _verify("deepspeed", *_SMALL, "plugins.packing.max_tokens=1024", "deepspeed.zero_stage=0")
    + ("parallel.ep=2", "model.family=mixtral", "model.moe.num_experts=4"),
    "experts": ("pytest", "tests/integrations/megatron/test_experts.py")
    + ("-k", "ep2-slices or ep4-packs or dummies or recompute"),
    "cut experts": ("pytest", "tests/integrations/megatron/test_experts.py")
    + ("-k", "cut_over and (recompute or padded)"),
    "copies on autoep": ("pytest", "tests/integrations/deepspeed/test_experts.py")
    + ("-k", "divided_experts and 1-more1 or loop_of_others and 2-4-None or change_no_count"),
    "router losses": ("pytest", "tests/integrations/megatron/unmodified/test_router_losses.py")
    + ("-k", "means and tp2ep2"),
    "together": ("pytest", "tests/integrations/megatron/unmodified/test_together.py", "-k", "copies"),
    "together, in an order": ("pytest", "tests/integrations/megatron/unmodified/test_together.py", "-k", "order_of"),
    "samples": ("pytest", "tests/integrations/huggingface/test_samples.py"),
    "mesh in loops": ("pytest", "tests/integrations/megatron/unmodified/test_mesh.py", "-k", "dp2 and means"),
    "context in loops": ("pytest", "tests/integrations/megatron/unmodified/test_context_parallel.py")
    + ("-k", "means and not dp2 and not pp2"),
    "forms": ("pytest", "tests/integrations/megatron/unmodified/test_forms.py"),
    "rows": ("pytest", "tests/integrations/megatron/unmodified/test_rows.py"),
    "packed loops": ("pytest", _PACKED, "-k", "packed_samples and dp2"),
    "loops of rows": ("pytest", _PACKED, "-k", "tensordicts and dp2"),
    "rounds of losses": ("pytest", "tests/integrations/megatron/unmodified/test_sharing.py"),
    "trainer": ("pytest", f"{_TRAINER}::test_plans_of_the_packing_plugin_are_exact"),
    "trainer zero 3": ("pytest", f"{_TRAINER}::test_slices_and_shared_micro_batches_are_exact_under_zero[3]"),
    "accelerate": ("pytest", "tests/integrations/huggingface/test_accelerate.py"),
    "user's loop": ("pytest", "tests/integrations/deepspeed/unmodified/test_promises.py"),
    "counts": ("pytest", "tests/integrations/deepspeed/unmodified/test_counts.py"),
    "rounds": ("pytest", "tests/core/plan/test_rounds.py"),
    "gate": ("pytest", "tests/runtime/experts/test_gate.py"),
    "exact quotas": ("pytest", "tests/core/experts/test_exact.py", "tests/runtime/experts/test_exact_on_device.py"),
    "quota laws": ("pytest", "tests/core/experts/test_quotas.py"),
    "token sources": ("pytest", "tests/core/experts/test_sources.py"),
    "planners of layers": ("pytest", "tests/plugins/moe/test_clone.py", "tests/plugins/moe/test_reroute.py"),
    "labels": ("pytest", "tests/runtime/attention/test_pack.py", "-k", "labels_of_a_batch"),
    "prefix": ("pytest", "tests/runtime/attention/test_prefix.py"),
    "windows": ("pytest", "tests/runtime/attention/test_windows.py"),
    "latent": ("pytest", _SPEC, "-k", "latent and yarn"),
    "te windows": ("pytest", _SPEC, "-k", "windows"),
    "interleaved": ("pytest", _SPEC, "-k", "interleaved"),
    "local windows": ("pytest", "tests/integrations/megatron/unmodified/test_order.py", "-k", "windows"),
    "executor": ("pytest", "tests/runtime/stage/test_executor.py"),
    "scores": ("pytest", "tests/integrations/megatron/test_score.py", "-k", "slices"),
    "chunks": ("pytest", "tests/integrations/megatron/unmodified/test_chunks.py", "-k", "dummies"),
    "further tokens": ("pytest", "tests/integrations/megatron/unmodified/test_mtp.py", "-k", "dp2-means"),
    "one queue": ("pytest", "tests/independent/test_one_queue.py"),
    "planner": ("pytest", "tests/core/planning/test_planner.py"),
    "caps": ("pytest", "tests/core/planning/test_chain.py", "tests/independent"),
    "adam's mends": ("pytest", "tests/patches/test_megatron_fixes.py"),
    "checkpoints": ("pytest", "tests/commands/saving/test_checkpoints.py", "-m", "not slow"),
    "adapters": ("pytest", "tests/integrations/huggingface/test_adapters.py"),
    "tenants": ("pytest", f"{_TENANTS}[one]"),
    "tenants on ranks": ("pytest", f"{_TENANTS}[dp2]"),
    "tenants on tensor-parallel ranks": ("pytest", f"{_TENANTS}[dp2tp2]"),
    "frozen layers": ("pytest", _FROZEN, "-k", "begins_with_its_replay"),
    "frozen in a row": ("pytest", _FROZEN, "-k", "in_a_row"),
    "frozen zero 3": ("pytest", _FROZEN, "-k", "three_steps and 3-more"),
    "frozen stages": ("pytest", f"{_FROZEN}::test_pipelines_train_each_tenant_as_if_alone", "-k", "4-False"),
    "halving": ("pytest", "tests/commands/tenants/verdicts/test_halving.py"),
    "scored tenants": ("pytest", "tests/commands/tenants/verdicts/test_evaluation.py"),
    "patience": ("pytest", "tests/commands/tenants/verdicts/test_verdicts.py", "-k", "patience"),
    "sweeps": ("pytest", "tests/commands/tenants/verdicts/test_verdicts.py", "-k", "sweep or turns"),
    "recomputed tenants": ("pytest", "tests/integrations/megatron/test_tenants.py", "-k", "recomputes_every_layer"),
    "replayed dropout": ("pytest", "tests/integrations/megatron/test_dropout.py", "-k", "whatever_the_plan or hooks"),
    "isolation": ("pytest", "tests/integrations/megatron/test_isolation.py", "-k", "one"),
    "batches of tenants": ("pytest", "tests/commands/tenants/test_drawing.py"),
    "folder of tenants": ("pytest", "tests/commands/tenants/arrivals/test_folder.py"),
    "samples of tenants": ("pytest", "tests/commands/tenants/arrivals/test_reading.py"),
    "killed tenants": ("pytest", "tests/commands/tenants/test_loop.py", "-k", "killed and layout0"),
    "waiting tenants": ("pytest", "tests/commands/tenants/test_loop.py", "-k", "waits_in_order"),
    "reading": ("pytest", "tests/core/input/test_reading.py"),
    "unpickling": ("pytest", "tests/runtime/test_unpickling.py"),
    "frozen store": ("pytest", "tests/runtime/watchdog/test_watchdog.py", "-k", "frozen_holder"),
}

_IN_LOOPS = "integrations/megatron/unmodified"

_PREFIX, _ENGINE_HOST = "runtime/attention/prefix.py", "integrations/deepspeed/engine_host.py"
_REDUCTION, _SCALED = (
    "integrations/megatron/reduction.py",
    "            self._ddp.scale_gradients(1.0 / self.totals[1])\n",
)
_STAGE = "integrations/deepspeed/pipeline/stage.py"
_USERS_ATTENTION = "integrations/megatron/unmodified/attention.py"
_LOADER = "integrations/deepspeed/unmodified/loader.py"

_FURTHER = "integrations/megatron/unmodified/stock/mtp.py"
_ROUTING = "runtime/experts/routing.py"
_PACK = "runtime/attention/pack.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "positions of a part of a sample in a loop begin at 0",
        f"{_IN_LOOPS}/samples.py",
        "positions = [torch.arange(s.start, s.stop) for s in slices]",
        "positions = [torch.arange(s.stop - s.start) for s in slices]",
        "mesh in loops",
    ),
    Mutant(
        "context-parallel ranks have chunks in a row, not in zig-zag",
        f"{_IN_LOOPS}/ranks/context_parallel.py",
        "min(k, chunks - 1 - k)",
        "k // 2",
        "context in loops",
    ),
    Mutant(
        "a context-parallel rank counts its first chunk twice",
        f"{_IN_LOOPS}/ranks/context_parallel.py",
        "chunks[rank] + chunks[-1 - rank]",
        "2 * chunks[rank]",
        "context in loops",
    ),
    Mutant(
        "every context-parallel rank reports what the first one has",
        f"{_IN_LOOPS}/ranks/call_plan.py",
        "columns.number(i, place_in_row)",
        "columns.number(i, 0)",
        "context in loops",
    ),
    Mutant(
        "losses of ranks that share samples in a loop do not meet",
        f"{_IN_LOOPS}/ranks/sharing.py",
        "        return check(_in_launch_rounds(plan))\n",
        "        return plan\n",
        "rounds of losses",
    ),
    Mutant(
        "a shared sample is sent to one of its ranks alone",
        f"{_IN_LOOPS}/ranks/sharing.py",
        "                ranks[piece.sequence].add(rank)\n",
        "                ranks[piece.sequence] = {rank}\n",
        "rounds of losses",
    ),
    Mutant(
        "a quota of a copy is off by one",
        "core/experts/exact.py",
        "(starts_R + tokens_R)[:, None]",
        "(starts_R + tokens_R - 1)[:, None]",
        "exact quotas",
    ),
    Mutant(
        "a giver that is overdrawn takes from nobody",
        "core/experts/exact.py",
        "    taken_R[givers_R] += overdrawn_R\n",
        "",
        "exact quotas",
    ),
    Mutant(
        "the law of quotas lets tokens be repeated",
        "core/experts/quotas.py",
        "np.flatnonzero(wanted_E != served_E)",
        "np.flatnonzero(wanted_E > served_E)",
        "quota laws",
    ),
    Mutant(
        "the law of quotas lets a rank have a copy beyond its slots",
        "core/experts/quotas.py",
        "        if len(experts) > policy.slots:\n",
        "        if len(experts) > policy.slots + 1:\n",
        "quota laws",
    ),
    Mutant(
        "the law of quotas does not ask whose copies they are",
        "core/experts/quotas.py",
        "set(experts) - set(copies[rank])",
        "set(experts) - set().union(*copies)",
        "quota laws",
    ),
    Mutant(
        "senders and receivers of an expert's tokens are swapped",
        "core/experts/sources.py",
        "_between(rank, quotas_ER[divided], counts_RE.T[divided], node_ranks).T",
        "_between(rank, counts_RE.T[divided], quotas_ER[divided], node_ranks).T",
        "token sources",
    ),
    Mutant(
        "a copy takes the slot of the rank that gives it",
        "plugins/moe/few.py",
        "            free[taker] -= 1\n",
        "            free[giver] -= 1\n",
        "planners of layers",
    ),
    Mutant(
        "tokens over copies stop at the first bound of several",
        "plugins/moe/reroute.py",
        "                share = -(-sum(tokens[rank] for rank in reached) // len(reached))\n",
        "                share = max(tokens)\n",
        "planners of layers",
    ),
    Mutant(
        "one rank of a group skips a forward that its peers run",
        "core/plan/program.py",
        "            if any(runs[i] is not None for i in together):\n",
        "            if all(runs[i] is not None for i in together):\n",
        "rounds",
    ),
    Mutant(
        "backwards of a group may belong to forwards of several rounds",
        "core/plan/program.py",
        'words.append(f"the backward of pass {number}{layers}")',
        'words.append(f"the backward of pass {number * 0}{layers}")',
        "rounds",
    ),
    Mutant(
        "ranks that share experts may run different passes",
        "runtime/experts/gate.py",
        "        if len(set(seals)) > 1:\n",
        "        if len(set(seals)) > 2:\n",
        "gate",
    ),
    Mutant(
        "a dummy counts in the losses of routers",
        _ROUTING,
        "    return pack.sequence_ids_T != PADDING\n",
        "    return pack.sequence_ids_T >= PADDING\n",
        "experts",
    ),
    Mutant(
        "the balance loss of a sequence is that of its pack",
        _ROUTING,
        "            counts_E = self._complete_counts(routed, piece.sequence)\n",
        "            counts_E = routed.counts()\n",
        "experts",
    ),
    Mutant(
        "of several copies one alone sends its gradient home",
        "runtime/experts/copies.py",
        "            place.add_(part) if add else place.copy_(part)\n",
        "            place.copy_(part)\n",
        "experts",
    ),
    Mutant(
        "copies that come in pieces keep their gradients",
        "runtime/experts/copies.py",
        "            gradient_CN = self._pieces_summed(gradient_CN)\n",
        "            gradient_CN = gradient_CN\n",
        "experts",
    ),
    Mutant(
        "gradients of cut experts go by the layout of another pass",
        "runtime/experts/copies.py",
        "        journey, gradient_CN = self.journey, gradient_CN.contiguous()\n",
        '        journey, Fetch.past = getattr(Fetch, "past", self.journey), self.journey\n'
        "        gradient_CN = gradient_CN.contiguous()\n",
        "cut experts",
    ),
    Mutant(
        "the pieces of a rank are taken for those of its neighbour",
        "core/experts/messages.py",
        "Message(r, rank, expert, r, count)",
        "Message(r, rank, expert, (r + 1) % count, count)",
        "cut experts",
    ),
    Mutant(
        "the copies of a rank are taken for one another",
        "runtime/experts/balance.py",
        "*self.copies[rank]]",
        "*reversed(self.copies[rank])]",
        "experts",
    ),
    Mutant(
        "a rank that plans other quotas goes unnoticed",
        "runtime/experts/gate.py",
        "layer, self._balance.checksum]",
        "layer, 0]",
        "gate",
    ),
    Mutant(
        "the norm counts the experts of one rank",
        "integrations/megatron/reduction.py",
        "group=parallel_state.get_expert_tensor_model_pipeline_parallel_group()",
        "group=parallel_state.get_model_parallel_group()",
        "experts",
    ),
    Mutant(
        "a token that runs again moves the bias of its experts again",
        "integrations/megatron/model/experts.py",
        "        if torch.is_grad_enabled():\n            self._count(chosen_TE)\n",
        "        self._count(chosen_TE)\n",
        "experts",
    ),
    Mutant(
        "dK of earlier slices is dropped",
        _PREFIX,
        "            entry.dk_PGD[: piece.stop].add_(dk_PNGD)\n",
        "            entry.dk_PGD[piece.start : piece.stop].add_(dk_PNGD[piece.start :])\n",
        "slices",
    ),
    Mutant(
        "dV of earlier slices is dropped by short slices",
        _PREFIX,
        "            entry.dv_PGD[: piece.stop].add_(dv_PNGD)\n",
        "            start = 0 if piece.stop - piece.start > 4 else piece.start\n"
        "            entry.dv_PGD[start : piece.stop].add_(dv_PNGD[start:])\n",
        "prefix",
    ),
    Mutant(
        "positions of late slices are one off",
        _PACK,
        "positions_T[first:last] = np.arange(piece.start, piece.stop)",
        "positions_T[first:last] = np.arange(piece.start, piece.stop) + (piece.start > 0)",
        "slices",
    ),
    Mutant(
        "the label at the border of a slice is lost",
        _PACK,
        "targets = labels_of(piece.sequence)[piece.start + 1 : piece.stop + 1]",
        "targets = labels_of(piece.sequence)[piece.start + 1 : piece.stop + (len(slices) > 1)]",
        "slices",
    ),
    Mutant(
        "a dummy counts in the loss",
        _PACK,
        "    labels_T = np.full(segments[-1], IGNORE, dtype=np.int64)",
        "    labels_T = np.full(segments[-1], IGNORE if slices else 0, dtype=np.int64)",
        "zero 3",
    ),
    Mutant(
        "attention's scale is two per cent off in bfloat16",
        "runtime/attention/sharing/attention.py",
        "    block = choose_block(q_THD.device, q_THD.dtype, q_THD.shape[-1], window is not None)\n",
        "    block = choose_block(q_THD.device, q_THD.dtype, q_THD.shape[-1], window is not None)\n"
        "    scale = scale * 1.02 if q_THD.dtype == torch.bfloat16 else scale\n",
        "slices bf16",
    ),
    Mutant(
        "dK and dV are summed in bfloat16",
        _PREFIX,
        "    return grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)",
        "    return grad.to(grad.dtype, copy=True)",
        "prefix",
    ),
    Mutant(
        "the backward's scale is off where a pack has one slice",
        "runtime/attention/sharing/running_job.py",
        "            inputs = self._inputs(number, tile, keys)\n            dq, *dkv",
        "            inputs = self._inputs(number, tile, keys)\n"
        "            inputs = inputs._replace(scale=inputs.scale * (1.0 if len(self.job.parts) > 1 else 1.001))\n"
        "            dq, *dkv",
        "slices",
    ),
    Mutant(
        "a ring loses dK and dV after two hops",
        "runtime/attention/sharing/ring.py",
        "            if going is not None:\n                grads += going()",
        "            if going is not None:\n                grads += going() * (hop < 2)",
        "mesh",
    ),
    Mutant(
        "a ring's tile over the prefix is dropped",
        "runtime/attention/sharing/ring.py",
        "        candidates = [Tile(0, own.first, theirs.before, False), Tile(own.first, own.own, theirs.all, False)]",
        "        candidates = [Tile(own.first, own.own, theirs.all, False)]",
        "quick shared",
    ),
    Mutant(
        "a share of gathered gradients is a per mille off",
        "runtime/attention/sharing/gather.py",
        "going = self.exchange(rows, {group: shares[group] for group in self._others}, 0, 1)",
        "going = self.exchange(rows, {g: shares[g] * (1 if g else 0.999) for g in self._others}, 0, 1)",
        "mesh",
    ),
    Mutant(
        "gradients of a shared key head overwrite each other",
        "runtime/attention/sharing/relayout.py",
        "                    total[part.rows, _span(part, spec)] += next(values)",
        "                    total[part.rows, _span(part, spec)] = next(values)",
        "mesh one key head",
    ),
    Mutant(
        "gradients of query heads are not summed over their key head",
        "runtime/attention/sharing/heads.py",
        "return grad_MKD.new_zeros(len(grad_MKD), keys, dim).index_add_(1, index, grad_MKD)",
        "return grad_MKD.new_zeros(len(grad_MKD), keys, dim).index_copy_(1, index, grad_MKD)",
        "mesh three ranks",
    ),
    Mutant(
        "a replay's input is gathered from the start",
        "runtime/stage/tape.py",
        "rows[start - have.start : stop - have.start]",
        "rows[: stop - start]",
        "quick stages",
    ),
    Mutant(
        "the executor runs a forward that the program leaves out",
        "runtime/stage/executor.py",
        "        self._trainer.tape.write(pack.slices, pack.segments, self._received.flatten(0, 1))\n",
        "        self._trainer.tape.write(pack.slices, pack.segments, self._received.flatten(0, 1))\n"
        "        with torch.no_grad():\n"
        '            self._trainer.forward(self._loaded, self._received, action._replace(kind="forward_kv"))\n',
        "executor",
    ),
    Mutant(
        "the executor skips a forward whose keys a replay writes again",
        "runtime/stage/executor.py",
        "        with torch.no_grad(), self._running(action):\n"
        "            self._result = self._trainer.forward(loaded, received, action)",
        "        if self._stage and self._stage == self._plan.limits.num_stages - 1:\n            return\n"
        "        with torch.no_grad(), self._running(action):\n"
        "            self._result = self._trainer.forward(loaded, received, action)",
        "executor",
    ),
    Mutant(
        "keys of a sequence stay when its last slice has been scored",
        "runtime/stage/executor.py",
        "if self._prefix and stop == self._plan.lengths[sequence]:",
        "if self._prefix and stop > self._plan.lengths[sequence]:",
        "scores",
    ),
    Mutant(
        "the loss of a later slice counts twice in a score",
        "integrations/scoring.py",
        "        sums, counts = slice_losses(values.double(), pack)\n",
        "        sums, counts = slice_losses(values.double(), pack)\n"
        "        sums = sums * torch.tensor([2.0 if s.start else 1.0 for s in pack.slices], dtype=sums.dtype)\n",
        "scores",
    ),
    Mutant(
        "the forward of a score keeps its graph",
        "runtime/stage/executor.py",
        "        with torch.no_grad(), self._running(action):\n"
        "            self._result = self._trainer.forward(loaded, self._received, action)",
        "        with self._running(action):\n"
        "            self._result = self._trainer.forward(loaded, self._received, action)",
        "executor",
    ),
    Mutant(
        "the last of many weight gradients is skipped",
        "runtime/stage/deferred.py",
        "            roots = [_Weight.apply(item.weight, [item]) for item in reversed(left)]",
        "            del left[len(left) - (len(left) > 3) :]\n"
        "            roots = [_Weight.apply(item.weight, [item]) for item in reversed(left)]",
        "weight passes",
    ),
    Mutant(
        "a weight pass leaves a token out of a bias",
        "runtime/stage/deferred.py",
        "db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None",
        "db = dy.reshape(-1, dy.shape[-1])[1:].sum(0) if ctx.needs_input_grad[1] else None",
        "weight passes, biases",
    ),
    Mutant(
        "a weight pass forgets the sum over tensor-parallel ranks",
        "integrations/megatron/model/linears.py",
        'sum_over=how["tp_group"] if how["allreduce_dgrad"] else None',
        "sum_over=None",
        "weight passes, tensor parallel",
    ),
    Mutant(
        "every tensor-parallel rank books the loss",
        "integrations/megatron/host.py",
        "Forward(reduction, books=self._last and self.tp_rank == 0)",
        "Forward(reduction, books=self._last)",
        "quick tensor parallel",
    ),
    Mutant(
        "norms of the first stage get half their gradient",
        _REDUCTION,
        _SCALED,
        _SCALED + "            for p in self._ddp.parameters() if self.local_loss == 0.0 else ():\n"
        "                p.main_grad.mul_(0.5 if p.dim() == 1 else 1.0)\n",
        "stages",
    ),
    Mutant(
        "gradients are kept after the first step",
        "integrations/megatron/host.py",
        "        self.ddp.zero_grad_buffer()\n",
        '        getattr(self, "_zeroed", None) or self.ddp.zero_grad_buffer()\n        self._zeroed = True\n',
        "quick overlap",
    ),
    Mutant(
        "the learning rate is not set",
        "integrations/megatron/model/gpt.py",
        '        group["lr"] = lr * group.get("lr_mult", 1.0)',
        '        group["lr"] = group["lr"]',
        "quick overlap",
    ),
    Mutant(
        "the norm for clipping counts tensor-parallel copies",
        _REDUCTION,
        'if tp_rank == 0 or getattr(parameter, "tensor_model_parallel", False):',
        "if True:",
        "quick tensor parallel",
    ),
    Mutant(
        "parameters share Adam's step after a resume",
        "integrations/megatron/saving/checkpoint.py",
        '            states["step"] = step.clone()',
        '            states["step"] = steps[0]',
        "quick overlap",
    ),
    Mutant(
        "a loop's optimizer begins anew where the checkpoint has steps",
        "patches/megatron_fixes.py",
        '{**tensors, "step": step}',
        '{"step": step, **tensors}',
        "adam's mends",
    ),
    Mutant(
        "a loop's optimizer counts one step for all parameters after a resume",
        "patches/megatron_fixes.py",
        'state["step"] = state["step"].clone()',
        'state["step"] = state["step"]',
        "adam's mends",
    ),
    Mutant(
        "the order of the plan ahead is saved",
        "commands/saving/resuming.py",
        'state = {"order": planned.draw.state,',
        'ahead = planned.draw.state["consumed"] + len(planned.draw.samples)\n'
        '    state = {"order": {**planned.draw.state, "consumed": ahead},',
        "quick overlap",
    ),
    Mutant(
        "rank 1 reads wrong tokens later in the run",
        "commands/_shared/job.py",
        "return lambda index: self.source.tokens(int(draw.samples[index]))",
        'late = self.world.rank == 1 and draw.state.get("consumed", 0) > 4 * len(draw.samples)\n'
        "        return lambda index: self.source.tokens(int(draw.samples[index]))[:: -1 if late else 1].copy()",
        "long",
    ),
    Mutant(
        "rank 1 reads wrong tokens after a resume",
        "commands/_shared/job.py",
        "return lambda index: self.source.tokens(int(draw.samples[index]))",
        'late = self.world.rank == 1 and draw.state.get("consumed", 0) > 2 * len(draw.samples)\n'
        "        return lambda index: self.source.tokens(int(draw.samples[index]))[:: -1 if late else 1].copy()",
        "quick overlap",
    ),
    Mutant(
        "a gradient is NaN",
        _REDUCTION,
        _SCALED,
        _SCALED + "            for name, p in self._ddp.named_parameters():\n"
        '                p.main_grad.mul_(float("nan") if "layers.1.mlp.linear_fc2" in name else 1.0)\n',
        "quick overlap",
    ),
    Mutant(
        "a gradient is NaN under DeepSpeed",
        _ENGINE_HOST,
        "        return dict(self._whole(full_gradients(self._trained_parameters())))",
        "        named = self._whole(full_gradients(self._trained_parameters()))\n"
        '        return {n: g * (float("nan") if "layers.1.mlp.down" in n else 1.0) for n, g in named.items()}',
        "quick deepspeed",
    ),
    Mutant(
        "ZeRO 3 divides gradients by the ranks once more",
        "integrations/deepspeed/host.py",
        "share = self.world.size if self.stage == 3 else 1",
        "share = 1",
        "zero 3",
    ),
    Mutant(
        "the number of targets is that of the first step",
        _ENGINE_HOST,
        "        num_targets = count_targets(plan.lengths, labels)\n",
        '        num_targets = self._first = getattr(self, "_first", 0) or count_targets(plan.lengths, labels)\n',
        "quick deepspeed",
    ),
    Mutant(
        "prompts count in the divisor",
        "runtime/attention/labels.py",
        " if labels is None else labels.targets.sum()",
        "",
        "labels",
    ),
    Mutant(
        "a label is shifted by one behind the border of a slice",
        _PACK,
        "labels_of(piece.sequence)[piece.start + 1 : piece.stop + 1]",
        "labels_of(piece.sequence)[piece.start + (not piece.start) : piece.stop + (not piece.start)]",
        "labels",
    ),
    Mutant(
        "a sequence gets the mask of another one",
        _PACK,
        "labels_of(piece.sequence)[",
        "labels_of(slices[0].sequence)[",
        "labels",
    ),
    Mutant(
        "prompts are learned where Megatron's own schedule runs",
        "integrations/megatron/batch.py",
        "            labels_of=self._labels_of,\n",
        "",
        "quick tensor parallel",
    ),
    Mutant(
        "losses of routers count prompts among the targets",
        _ROUTING,
        "count_targets(lengths, labels)",
        "count_targets(lengths)",
        "experts",
    ),
    Mutant(
        "one group alone gets the learning rate",
        _ENGINE_HOST,
        "        for group in self.engine.basic_optimizer.param_groups:\n",
        "        for group in self.engine.basic_optimizer.param_groups[:1]:\n",
        "quick deepspeed",
    ),
    Mutant(
        "labels on padding are dropped with their padding",
        "integrations/huggingface/refusals.py",
        "    if bool(counts.any()):",
        "    if False:",
        "samples",
    ),
    Mutant(
        "a flattened row is one sample",
        "integrations/huggingface/samples.py",
        "borders = [*(starts_T.nonzero().flatten() + first).tolist(), stop]",
        "borders = [first, stop]",
        "samples",
    ),
    Mutant(
        "a Trainer's loss is divided by the targets of one rank",
        _TRAINER_STEP,
        'model, num_items = call["model"], call.get("num_items_in_batch")',
        'model, num_items = call["model"], sum(int((s[1, 1:] != -100).sum()) for s in state.batch.own.values())',
        "trainer",
    ),
    Mutant(
        "a Trainer's last pack runs twice",
        _TRAINER_STEP,
        '    program = lower(plan, 0, rank, "in step")\n    if all(',
        '    program = lower(plan, 0, rank, "in step")\n    program = (*program, *program[-2:])\n    if all(',
        "trainer",
    ),
    Mutant(
        "a Trainer's packs have no borders",
        _TRAINER_STEP,
        "    model.set_attn_implementation(attention.NAME)",
        "    model.set_attn_implementation(stock)",
        "trainer",
    ),
    Mutant(
        "a Trainer's slice loses the label behind it",
        "integrations/huggingface/inputs.py",
        '        "shift_labels": pack.labels_T[None],\n',
        "",
        "trainer",
    ),
    Mutant(
        "a Trainer's gradients are summed over ranks one pass early",
        _TRAINER_STAGE,
        "self._reducing(self._left == 1)",
        "self._reducing(self._left == 2)",
        "trainer",
    ),
    Mutant(
        "a Trainer's engine under ZeRO 3 is not told of backwards in a row",
        _TRAINER_STAGE,
        "            self._reduction.before_backward()",
        "            pass",
        "trainer zero 3",
    ),
    Mutant(
        "a loop of Accelerate takes the mean of a pack",
        "integrations/huggingface/accelerate_loop.py",
        "= 1.0 / samples.targets_beside[piece.sequence]",
        "= 1.0 / pack.num_targets",
        "accelerate",
    ),
    Mutant(
        "a Trainer's sample goes to the ranks with another's tokens",
        "runtime/world/exchange.py",
        "for place, piece in zip(places, pieces, strict=True)}",
        "for place, piece in zip(places[::-1], pieces, strict=True)}",
        "trainer",
    ),
    Mutant(
        "samples are collated one by one, so that padding is not seen",
        _LOADER,
        "        for rows in stock_batches:",
        "        for rows in [[row] for rows in stock_batches for row in rows]:",
        "user's loop",
    ),
    Mutant(
        "the shortest sample is measured against a window",
        _LOADER,
        "refuse_lengths(self._config, longest,",
        "refuse_lengths(self._config, min(entry.length for entry in entries),",
        "user's loop",
    ),
    Mutant(
        "a sample that reads otherwise on another rank is taken",
        _LOADER,
        "    if entry.place >= len(samples) or Entry.of(entry.rows, entry.place, samples[entry.place]) != entry:",
        "    if entry.place >= len(samples) or len(samples[entry.place].tokens) != entry.length:",
        "user's loop",
    ),
    Mutant(
        "a dummy weighs a target",
        "integrations/deepspeed/unmodified/batches.py",
        "lambda _: np.zeros(2, dtype=np.int64)), 0",
        "lambda _: np.zeros(2, dtype=np.int64)), 1",
        "user's loop",
    ),
    Mutant(
        "dummies show a loss of their own",
        "integrations/deepspeed/unmodified/loop.py",
        "    elif state.weight:",
        "    elif False:",
        "user's loop",
    ),
    Mutant(
        "a user's step is filled up with dummies",
        "integrations/deepspeed/unmodified/counts.py",
        "    while len(result) < count and",
        "    while len(result) < 1 and",
        "counts",
    ),
    Mutant(
        "ranks in step run real micro-batches though they are slower",
        "integrations/deepspeed/unmodified/counts.py",
        "    return dummies if slower else real",
        "    return real",
        "counts",
    ),
    Mutant(
        "a replay's loss weighs half",
        _STAGE,
        "        return self._weighed(self._sum(output[0], pack), pack)",
        '        return self._weighed(self._sum(output[0], pack), pack) * (1.0 if action.kind == "forward" else 0.5)',
        "quick deepspeed stages",
    ),
    Mutant(
        "an idle rank of a stage adds ones",
        _STAGE,
        "                parameter.grad = torch.zeros_like(parameter)",
        "                parameter.grad = torch.ones_like(parameter)",
        "quick deepspeed stages",
    ),
    Mutant(
        "a recomputed layer sees positions of another pack",
        "integrations/megatron/model/rope.py",
        "    return torch.index_select(table, 0, pack.positions_T.to(table.device))",
        "    if not torch.is_grad_enabled():\n"
        "        _of_slots.had = pack.positions_T\n"
        '    had = getattr(_of_slots, "had", pack.positions_T)\n'
        "    had = had[torch.arange(pack.num_padded_tokens) % len(had)]\n"
        "    return torch.index_select(table, 0, had.to(table.device))",
        "quick stages",
    ),
    Mutant(
        "reduction overlaps with an order of the plan's own",
        _REDUCTION,
        "self.quiet = self.overlap and (idle or not plan.in_host_schedule)",
        "self.quiet = self.overlap and idle",
        "quick overlap",
    ),
    Mutant(
        "weights do not decay",
        "integrations/megatron/model/gpt.py",
        '        group["weight_decay"] = train.weight_decay * group.get("wd_mult", 1.0)',
        '        group["weight_decay"] = 0.0',
        "quick overlap",
    ),
    Mutant(
        "norms decay",
        "integrations/megatron/model/gpt.py",
        '        group["weight_decay"] = train.weight_decay * group.get("wd_mult", 1.0)',
        '        group["weight_decay"] = train.weight_decay',
        "quick overlap",
    ),
    Mutant(
        "one rank's other plan is no matter",
        "core/planning/planner.py",
        "    if odd:\n        raise RankError(",
        "    if len(odd) > 1:\n        raise RankError(",
        "planner",
    ),
    Mutant(
        "a plan over the caps is trained",
        "core/planning/chain.py",
        "        plan = self._under_caps(plan.revised(notes=(*plan.notes, *notes)) if notes else plan)",
        "        plan = plan.revised(notes=(*plan.notes, *notes)) if notes else plan",
        "caps",
    ),
    Mutant(
        "hashes are not compared",
        "runtime/files.py",
        "if hashes and wanted.hash and _stamp(path) != wanted",
        "if not hashes and wanted.hash and _stamp(path) != wanted",
        "checkpoints",
    ),
    Mutant(
        "a parser's own errors come through",
        "core/input/reading.py",
        "        return _tree(loader.construct_document(root))\n    except Exception as error:",
        "        return _tree(loader.construct_document(root))\n    except yaml.YAMLError as error:",
        "reading",
    ),
    Mutant(
        "checkpoints may run code",
        "runtime/unpickling.py",
        '    os.environ[FORCE] = "1"',
        '    os.environ[FORCE] = "0"',
        "unpickling",
    ),
    Mutant(
        "nobody notices that the store is silent",
        "runtime/watchdog/watchdog.py",
        "            if silent * self._every > self._gone_s:",
        "            if silent * self._every > 1000 * self._gone_s:",
        "frozen store",
    ),
    Mutant(
        "the norm of experts is each rank's own",
        "integrations/deepspeed/experts.py",
        "        dist.all_reduce(of_experts, group=self.group)\n",
        "",
        "divided experts",
    ),
    Mutant(
        "gradients are clipped by the mean of the ranks' norms",
        "integrations/deepspeed/host.py",
        "            self.engine.clip_fp32_gradients = self._clip\n",
        "            pass\n",
        "divided experts",
    ),
    Mutant(
        "the experts of a rank are taken for those of another",
        "integrations/deepspeed/experts.py",
        "        return torch.cat(parts).cpu()\n",
        "        return torch.cat(parts[::-1]).cpu()\n",
        "divided experts",
    ),
    Mutant(
        "the gradient of a copy does not come home",
        "runtime/experts/owners.py",
        "of_index.get(index, [None] * len(self.shapes))",
        "[None] * len(self.shapes)",
        "copies on autoep",
    ),
    Mutant(
        "copies stand in each other's slots",
        "runtime/experts/balance.py",
        "rank * self.slots + np.arange(len(experts))",
        "rank * self.slots + np.arange(len(experts))[::-1]",
        "copies on autoep",
    ),
    Mutant(
        "tokens go to slots of other experts",
        "runtime/experts/balance.py",
        "chosen_TK.flatten().argsort(stable=True)",
        "chosen_TK.flatten().argsort(stable=True, descending=True)",
        "copies on autoep",
    ),
    Mutant(
        "AutoEP's loads count slots for experts",
        "integrations/deepspeed/expert_slots.py",
        "        layer.tokens_per_expert.add_(counts_E)\n",
        "",
        "copies on autoep",
    ),
    Mutant(
        "ranks with copies reduce the gradients of experts in another order than ranks without",
        "integrations/deepspeed/expert_slots.py",
        '("w1", "w3", "w2")',
        '("w1", "w2", "w3")',
        "copies on autoep",
    ),
    Mutant(
        "a recomputed layer has the tenants of the pack that ran last",
        "runtime/adapters/hooks.py",
        "            running.spans = self._spans(pack)\n",
        "            self._last = self._spans(pack) if running is self._running[0] else self._last\n"
        "            running.spans = self._last\n",
        "recomputed tenants",
    ),
    Mutant(
        "tenants of a step share a divisor",
        "runtime/adapters/adapters.py",
        "gradients.div_(max(1, divisors[number]))",
        "gradients.div_(sum(divisors.values()))",
        "tenants",
    ),
    Mutant(
        "the part of an adapter that another rank owns is not taken",
        "runtime/adapters/adapters.py",
        "                tenant.values.copy_(values)\n",
        "                tenant.values[tenant.run] = values[tenant.run]\n",
        "tenants on ranks",
    ),
    Mutant(
        "a tenant without data is updated, too",
        "runtime/adapters/adapters.py",
        "        for number in sorted(rates):\n"
        "            self._tenants[number].update(rates[number], norms[number])\n",
        "        for number in sorted(self._tenants):\n"
        "            self._tenants[number].update(rates.get(number, 1e-3), norms.get(number, 0.0))\n",
        "tenants",
    ),
    Mutant(
        "an update of tenants moves a weight of the base",
        "integrations/tenants.py",
        "        self.adapters.update({number: lr[number] for number in good}, good)\n",
        "        self.adapters.update({number: lr[number] for number in good}, good)\n"
        "        next(self.model.parameters()).data.mul_(1 + 1e-9)\n",
        "tenants",
    ),
    Mutant(
        "tenants are clipped by the norm of all of them",
        "integrations/tenants.py",
        "{number: lr[number] for number in good}, good)",
        "{number: lr[number] for number in good}, dict.fromkeys(good, self._norm({})))",
        "tenants",
    ),
    Mutant(
        "the norm of a tenant counts what tensor-parallel ranks hold alike on each of them",
        "runtime/adapters/tenant.py",
        "            if matrix.shared or counts:\n",
        "            if matrix.shared or True:\n",
        "tenants on tensor-parallel ranks",
    ),
    Mutant(
        "a recomputed layer of ZeRO 3 is replayed when an adapter asks for it",
        "integrations/deepspeed/tenants/frozen.py",
        "        layer._gradient_checkpointing_func = partial(_marked, layer._gradient_checkpointing_func)\n",
        "        layer._gradient_checkpointing_func = partial(layer._gradient_checkpointing_func)\n",
        "frozen layers",
    ),
    Mutant(
        "backwards in a row keep the frozen weights that they gathered",
        "integrations/deepspeed/tenants/stage.py",
        "        self._releases.before_backward()\n",
        "",
        "frozen in a row",
    ),
    Mutant(
        "a pack of no tenant has no backward beside a frozen model",
        "integrations/deepspeed/tenants/frozen.py",
        "    return output.requires_grad_() if torch.is_grad_enabled() else output\n",
        "    return output\n",
        "frozen zero 3",
    ),
    Mutant(
        "adapters of a stage are summed over the stages",
        "integrations/deepspeed/tenants/pipeline.py",
        "        peers = Peers(grid.get_data_parallel_group(), stages)\n",
        "        peers = Peers(stages, stages)\n",
        "frozen stages",
    ),
    Mutant(
        "a tenant that has failed is updated",
        "integrations/tenants.py",
        "for number, result in self._results.items() if not result.failed}\n        self.adapters",
        "for number, result in self._results.items()}\n        self.adapters",
        "isolation",
    ),
    Mutant(
        "dropout counts from the start of a slice",
        "runtime/adapters/hooks.py",
        "torch.split(pack.positions_T, of_spans)",
        "torch.split(torch.arange(len(samples_T)), of_spans)",
        "replayed dropout",
    ),
    Mutant(
        "the gradient of an adapter's input does not go through its dropout",
        "runtime/adapters/product.py",
        "dx_tC += part.dropped(dz_tr @ layer.a_rC.to(dz_tr.dtype), layer.place)",
        "dx_tC += dz_tr @ layer.a_rC.to(dz_tr.dtype)",
        "replayed dropout",
    ),
    Mutant(
        "a batch that was drawn ahead is lost when tenants change",
        "commands/tenants/drawing.py",
        "            before.tenant.drawing = before.drawing\n",
        "            pass\n",
        "batches of tenants",
    ),
    Mutant(
        "a tenant's file is read while it is being written",
        "commands/tenants/arrivals/folder.py",
        "for name, stamp in stamps.items() if before.get(name) == stamp}",
        "for name, stamp in stamps.items() if before is not None}",
        "folder of tenants",
    ),
    Mutant(
        "a tenant is trained on other targets than were counted",
        "commands/tenants/arrivals/reading.py",
        "        if counted != wanted:\n",
        "        if False:\n",
        "samples of tenants",
    ),
    Mutant(
        "a killed job goes on with the batches of the start",
        "commands/tenants/records/saving.py",
        '"order": dict(tenant.order)',
        '"order": {}',
        "killed tenants",
    ),
    Mutant(
        "a killed job goes on with first moments in the place of second ones",
        "commands/tenants/records/saving.py",
        "_of_kind(moments, _SECOND)",
        "_of_kind(moments, _FIRST)",
        "killed tenants",
    ),
    Mutant(
        "who fits into memory overtakes who has come before",
        "commands/tenants/members.py",
        "        waiting = self._for_memory\n",
        "        waiting = sorted(self._for_memory, key=lambda one: one.adapter.r)\n",
        "waiting tenants",
    ),
    Mutant(
        "the better half of a sweep ends",
        "commands/tenants/verdicts/halving.py",
        "kept = set(ranked[: -(-len(ranked) // 2)])",
        "kept = set(ranked[len(ranked) // 2 :])",
        "halving",
    ),
    Mutant(
        "a rung closes without those who are on their way",
        "commands/tenants/verdicts/halving.py",
        "or not racing or None in losses.values()",
        "or not racing",
        "halving",
    ),
    Mutant(
        "tenants that are scored together go through one adapter",
        "commands/tenants/verdicts/evaluation.py",
        "np.full(len(samples), one.number, dtype=np.int64)",
        "np.full(len(samples), due[0].number, dtype=np.int64)",
        "scored tenants",
    ),
    Mutant(
        "the adapter of the last evaluation is kept for the best one",
        "commands/tenants/verdicts/verdicts.py",
        "            self._keep_best(tenant)\n        self._output.status(tenant)",
        "        self._keep_best(tenant)\n        self._output.status(tenant)",
        "patience",
    ),
    Mutant(
        "a tenant trains on while it is decided whether it stops",
        "commands/tenants/verdicts/verdicts.py",
        "            tenant.until = until\n",
        "            tenant.until = tenant.steps\n",
        "sweeps",
    ),
    Mutant(
        "a trial that made way begins anew",
        "commands/tenants/members.py",
        "                self._states[tenant.number] = state\n        return bool(resting)",
        "                self._states[tenant.number] = None\n        return bool(resting)",
        "sweeps",
    ),
    Mutant(
        "another config comes to stand beside the tensors that are there",
        "integrations/huggingface/folders/adapters.py",
        "        (folder / ADAPTER_MODEL).unlink(missing_ok=True)\n",
        "        pass\n",
        "adapters",
    ),
    Mutant(
        "a setting of an adapter that nobody knows is passed over",
        "integrations/huggingface/folders/adapter_config.py",
        "        if fields[key]:\n",
        "        if key in _CHOICES:\n",
        "adapters",
    ),
    Mutant(
        "an adapter is written with the alpha of its rank's default",
        "integrations/huggingface/folders/adapter_config.py",
        "        alpha_pattern={key: _whole(alpha) for key, alpha in adapter.alpha_pattern.items()},\n",
        "",
        "adapters",
    ),
    Mutant(
        "a second send does not wait until the first is taken",
        "core/simulate/one_queue.py",
        "max(starts[stage, op] + 1, taken)",
        "starts[stage, op] + 1",
        "one queue",
    ),
    Mutant(
        "an interleaved schedule is given a remainder that it refuses",
        "integrations/megatron/unmodified/stock/chunks.py",
        "max(0, stages - number % group) if number % group else 0",
        "group - number % group if number % group > stages else 0",
        "chunks",
    ),
    Mutant(
        "a window is forgotten where a sample is cut",
        "runtime/attention/sharing/running_job.py",
        "window, begin = self.call.window, 0",
        "window, begin = None, 0",
        "windows",
    ),
    Mutant(
        "the first key of a window is left out at the border of two slices",
        "runtime/attention/sharing/running_job.py",
        "tile.keys - (tile.end - tile.first) - window)",
        "tile.keys - (tile.end - tile.first) - window + 1)",
        "windows",
    ),
    Mutant(
        "gradients of the keys in a window go to the first keys",
        "runtime/attention/sharing/running_job.py",
        "sums[0][tile.keys - len(dk) : tile.keys] += dk",
        "sums[0][: len(dk)] += dk",
        "windows",
    ),
    Mutant(
        "a window is a token too short in whole samples",
        "runtime/attention/kernels.py",
        "(behind <= window)",
        "(behind < window)",
        "windows",
    ),
    Mutant(
        "the output of narrow values is cut from the wrong side",
        "runtime/attention/attention.py",
        "scores)[..., :width]",
        "scores)[..., -width:]",
        "windows",
    ),
    Mutant(
        "latent attention has the scale of plain attention",
        _USERS_ATTENTION,
        'getattr(layer, "softmax_scale", None) or config.softmax_scale',
        "config.softmax_scale",
        "latent",
    ),
    Mutant(
        "Transformer Engine is told of one sample in a pack",
        _USERS_ATTENTION,
        "borders, longest = pack.cu_seqlens_padded, max(end - first for first, end in pairwise(pack.segments))",
        "borders, longest = pack.cu_seqlens_padded[[0, -1]], pack.segments[-1]",
        "latent",
    ),
    Mutant(
        "windows lie in the layers beside theirs",
        _USERS_ATTENTION,
        "return layer.config.window_size, layer.config.window_attn_skip_freq, layer.layer_number",
        "return layer.config.window_size, layer.config.window_attn_skip_freq, layer.layer_number + 1",
        "te windows",
    ),
    Mutant(
        "interleaved angles go to the fused kernel, which does not interleave packs",
        _USERS_ATTENTION,
        "if config.rotary_interleaved or factor != 1:",
        "if factor != 1:",
        "interleaved",
    ),
    Mutant(
        "scores stay divided by the number of the layer",
        _USERS_ATTENTION,
        "(core.layer_number if core.config.apply_query_key_layer_scaling else 1)",
        "1",
        "local windows",
    ),
    Mutant(
        "further tokens weigh as if packs were micro-batches of the loop",
        _FURTHER,
        "weights_SK = means_SK * divisor / of_rank[:, None]",
        "weights_SK = means_SK",
        "further tokens",
    ),
    Mutant(
        "the last token of a sample has a further target",
        _FURTHER,
        "mask_T[start:end][layer + 1 :]",
        "mask_T[start:end][layer:]",
        "further tokens",
    ),
    Mutant(
        "the z-loss of a loop counts for all its micro-batches at once",
        "integrations/megatron/unmodified/experts.py",
        "cp / (num_microbatches * tokens_S)",
        "cp / tokens_S",
        "router losses",
    ),
    Mutant(
        "every tensor-parallel rank takes its router's slots for the first ones",
        "integrations/megatron/model/experts.py",
        "        first = self.tp_group.rank() * slots\n",
        "        first = 0\n",
        "router losses",
    ),
    Mutant(
        "sinkhorn routes regrouped samples",
        "integrations/megatron/unmodified/expert_rules.py",
        '_CHOOSING = ("sinkhorn", "quantile_balancing")',
        '_CHOOSING = ("quantile_balancing",)',
        "together",
    ),
    Mutant(
        "a loss in an order of whole micro-batches is that of one alone",
        "integrations/megatron/stage.py",
        "            number = self._own[0] if self._own else 1\n",
        "            number = 1\n",
        "together, in an order",
    ),
    Mutant(
        "a row of samples is one sample",
        f"{_FORMS}borders.py",
        "runs += [Run(row, start, n) for n, (start, size) in zip(true, slots, strict=True) if size]",
        "runs += [Run(row, 0, width)]",
        "forms",
    ),
    Mutant(
        "the padding behind a sample counts to it",
        f"{_FORMS}borders.py",
        "true = [n for _, n in slots] if lengths is None else _differences(lengths[row], inside, row)",
        "true = [n for _, n in slots]",
        "forms",
    ),
    Mutant(
        "the borders of a pack leave its padding out",
        f"{_FORMS}form.py",
        'pack.cu_seqlens if looks.get(twin) or key == "cu_seqlens_unpadded" else pack.cu_seqlens_padded',
        "pack.cu_seqlens",
        "forms",
    ),
    Mutant(
        "a loop's own parameters of its packs reach the model",
        "integrations/megatron/unmodified/forward_step.py",
        '{**call, "packed_seq_params": self._params, "attention_mask": None}',
        '{"packed_seq_params": self._params, "attention_mask": None, **call}',
        "packed loops",
    ),
    Mutant(
        "losses of rows are divided by the number of micro-batches that run",
        f"{_FORMS}row_step.py",
        "1.0 if per_token else len(batches) / own",
        "1.0",
        "rows",
    ),
    Mutant(
        "a repeated row has a loss",
        f"{_FORMS}row_step.py",
        "(loss * (float(real) * self._scale),",
        "(loss * self._scale,",
        "rows",
    ),
    Mutant(
        "a repeated row counts tokens",
        f"{_FORMS}row_step.py",
        "number * int(real)",
        "number",
        "rows",
    ),
    Mutant(
        "what was said of rows comes home in another order",
        "integrations/megatron/unmodified/rows.py",
        ".to(where) for place in places]",
        ".to(where) for place in reversed(places)]",
        "loops of rows",
    ),
    Mutant(
        "a mean over a micro-batch passes for a sum of rows",
        "integrations/megatron/unmodified/rows.py",
        "_CLOSE = 1e-2",
        "_CLOSE = 1e2",
        "loops of rows",
    ),
)
