"""Whether samples can be regrouped: two short ones of the script's own tokens, as the script runs them and as planned.

Each runs alone in a row as the script runs it, and both run at once as a planned step has them: in one pack, or as rows
of one batch, the shorter one padded as the script's collator pads. Compared are the logits of every token; the loss,
which is to be the sum of both and to halve where the number of targets doubles; and the gradient at the input
embeddings. Calls of packed attention are counted: one a layer. Where the script's own rows hold several samples, both
run side by side in such a row too. A model in which a sample feels another one or padding (batch norm, a loss of
experts' load), and a loss that is no sum over samples, stay as they are.

Four or five forwards and three or four backwards of at most 19 tokens, where samples have nothing besides tokens.

Shape legend: L = tokens of a sample, T = slots of a row or of a pack.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.step_plan import MicroBatch, Slice
from ...runtime.attention.pack import IGNORE, Pack, build_pack
from ...runtime.world.agreement import everyone, rank_and_size
from ..huggingface import attention
from ..huggingface.inputs import inputs_of
from ..huggingface.models import num_windows
from ..huggingface.rows import PaddedForm, rows_of
from .conditions import UNREACHED, twin_of
from .multimodal.measured import short_samples
from .multimodal.parts import NO_PARTS, ReadParts, joined
from .multimodal.step import FillerSample, PartsOfRank
from .pack_call import PackCalls, PackedRows
from .pack_loss import PackLoss
from .planning import StepForm, StepSamples, num_targets
from .proof import (
    Batch,
    Call,
    Compute,
    Experiment,
    ProbeModel,
    Proof,
    ProofRun,
    by_embedding,
    difference,
    probe_of,
    prove,
)
from .supported import inner_model

LENGTHS = (7, 12)
"""Tokens of the two samples at most: unlike, and short enough to cost little on any model."""
_PADDING = 3
"""Slots of padded rows beyond the longer sample, so that both have padding."""
_LINEAR = 1e-4
"""Largest relative difference that is rounding, of a loss that is computed twice from equal logits."""


def probe_samples(samples: Sequence[Tensor], *, from_start: bool = False) -> list[Tensor]:
    """Tokens and labels, int64 [2, L], of two short samples with targets, out of those of all ranks. Collective.

    Args:
        samples: int64 [2, L] of this rank; of all ranks at least one has a target.
        from_start: they begin where the samples do.
    """
    samples = [one for one in samples if num_targets(one)]
    # Of a single sample both its beginning and its end.
    pairs = zip((*samples[:2], *samples[:1]), LENGTHS, (0, -1), strict=False)
    own = [(one[:, :most] if from_start else _window(one, most, which)).clone() for one, most, which in pairs]
    return max(everyone(own), key=len)


def _window(sample: Tensor, most: int, which: int) -> Tensor:
    """At most so many tokens of a sample [2, L] around one of its targets."""
    target = int((sample[1, 1:] != IGNORE).nonzero().flatten()[which]) + 1
    first = max(0, min(target - most // 2, sample.shape[1] - most))
    return sample[:, first : first + most]


def weights_of(samples: Sequence[Tensor], times: float, divisor: Any = None) -> Tensor:
    """What the tokens of a pack of `probe_samples` count [1, T], each sample a batch of its own whose targets are
    counted so many times; ``divisor`` divides both instead."""
    counts = [times * num_targets(one) if divisor is None else float(divisor) for one in samples]
    own = [torch.full((one.shape[1],), 1 / count) for one, count in zip(samples, counts, strict=True)]
    return torch.cat(own)[None]


@dataclass(frozen=True, eq=False)
class SamplePair:
    """Two short samples, each as a batch of the script's own, and both as a micro-batch of a planned step."""

    samples: Sequence[Tensor]
    """int64 [2, L] each, tokens and labels."""
    row: Mapping[str, Any]
    """A batch of the script's own, whose keys the rows of single samples have."""
    rows: PaddedForm | None = None
    """How the padded rows of planned steps look; None: these have packs."""
    parts: ReadParts = NO_PARTS
    """What both have besides tokens."""
    flattened: bool = False
    """Rows of the script hold several samples, on some rank: such a row is measured, too."""

    @classmethod
    def of(
        cls, batch: StepSamples, form: StepForm, row: Mapping[str, Any], config: Any
    ) -> tuple[SamplePair, list[FillerSample]]:
        """Two samples of a step, to be planned in this form, and the short ones that fill up its micro-batches.
        Collective."""
        own, rows = batch.samples.own, None if form.packs else batch.rows
        if batch.parts is not None:
            samples, parts, fillers = short_samples(own, batch.parts, config)
        else:
            samples = probe_samples([*own.values()], from_start=batch.rows.start is not None)
            parts, fillers = NO_PARTS, []
        first, second = samples
        if rows and first.shape == second.shape and first.shape[1] > 2:
            # Rows of one length would hide what padding and means do.
            second = second[:, :-1]
        return cls((first, second), row, rows, parts, batch.flattened and batch.parts is None), fillers

    def forked(self) -> SamplePair:
        """The longer sample, and one that begins as it does and has other last tokens."""
        first = max(self.samples, key=lambda one: one.shape[1])
        second = first.clone()
        last, changed = first[0, -3:], first[0].max() + first[0].min() - first[0, -3:]
        second[0, -3:] = changed
        second[1, -3:] = torch.where(first[1, -3:] == last, changed, first[1, -3:])
        return replace(self, samples=(first, second), flattened=False)

    @property
    def experiment(self) -> Experiment:
        """Both at once against each alone."""
        noun = "padded rows" if self.rows else "a pack"
        planned = partial(self._together, self.samples)
        return Experiment(noun, self._stock, planned, self._compare, repeated=partial(self._alone, 0))

    def _stock(self, probe: ProbeModel) -> list[ProofRun]:
        alone = [probe.run(self._alone(i, probe)) for i in range(2)]
        probe.refuse_state()
        if self.flattened:
            self._refuse_own_rows(probe, alone)
        return alone

    def _compare(self, probe: ProbeModel, alone: list[ProofRun], planned: ProofRun) -> Proof:
        probe.refuse_draws()
        if self.rows is None:
            self._refuse_other_attention(probe, planned)
        if logits := _all_logits(planned, alone):
            self._refuse_other_tokens(probe, planned, "logits", self._off(*logits))
        may_cut = self._may_cut(probe, planned)
        if not may_cut and not self._halves(probe, planned):
            raise EvenloadError(
                "a loss with another divisor than the number of targets of the whole batch",
                f"{planned.loss:.6g} of a {probe.name} is not halved where the batch has twice as many targets",
            )
        probe.refuse_other_sum(self.experiment.noun, alone, planned)
        off = max(self._off(*gradients) for gradients in by_embedding(planned, alone))
        self._refuse_other_tokens(probe, planned, "gradients at the embeddings", off)
        sees_windows = planned.calls["windows"] >= num_windows(probe.model.config) and not planned.calls["untold"]
        return Proof(None, may_cut and not probe.mixers, sees_windows, tuple(probe.mixers or ()))

    def _alone(self, index: int, probe: ProbeModel) -> Batch:
        """A sample as a batch of the script's own."""
        sample, rows = self.samples[index], self.rows
        pack = self._pack([sample], probe)
        if rows and rows.start is not None:
            batch = rows_of(pack, rows)
        else:  # with the label of its first token, which some losses read
            tokens, labels = (one.to(probe.device, copy=True)[None] for one in sample)
            extra = {
                "attention_mask": torch.ones_like(tokens),
                "token_type_ids": torch.zeros_like(tokens),
                "position_ids": torch.arange(tokens.shape[1], device=probe.device)[None],
            }
            batch = {"input_ids": tokens, "labels": labels, **{k: v for k, v in extra.items() if k in self.row}}
        own, form = [*self.parts.of_rows[index : index + 1]], self.parts.form
        return {**batch, **joined(own, pack, form, rows=True, left=bool(rows and rows.left))}

    def _side_by_side(self, probe: ProbeModel) -> Batch:
        """Both samples in one row of the script's."""
        pack = self._pack(self.samples, probe)
        inputs = inputs_of(pack, with_mask=False)
        values = {
            "input_ids": inputs["input_ids"],
            "labels": inputs["labels"],
            "position_ids": inputs["position_ids"],
            "token_type_ids": torch.zeros_like(inputs["input_ids"]),
            "seq_idx": pack.sequence_ids_T[None],
            "cu_seq_lens_q": pack.cu_seqlens,
            "cu_seq_lens_k": pack.cu_seqlens,
        }
        row = {"labels": torch.tensor(0), **self.row}
        own = {key: one.to(row[key], copy=True) for key, one in values.items() if isinstance(row.get(key), Tensor)}
        return own | {key: pack.max_seqlen for key in ("max_length_q", "max_length_k") if key in row}

    def _together(self, samples: Sequence[Tensor], probe: ProbeModel) -> Batch:
        """Samples as a micro-batch of a planned step."""
        rows, form = self.rows, self.parts.form
        pack = self._pack(samples, probe, _PADDING + max(one.shape[1] for one in samples) if rows else 0)
        batch = rows_of(pack, rows) if rows else inputs_of(pack, with_mask="attention_mask" in self.row)
        if form:
            parts = PartsOfRank(probe.model, form, dict(enumerate(self.samples)), dict(enumerate(self.parts.of_rows)))
            batch |= parts.inputs_of(pack, rows=rows is not None, left=bool(rows and rows.left))
        return batch

    def _pack(self, samples: Sequence[Tensor], probe: ProbeModel, pad_to: int = 0) -> Pack:
        of_token, of_label = ([one[kind].numpy() for one in samples] for kind in range(2))
        slices = tuple(Slice(i, 0, one.shape[1]) for i, one in enumerate(samples))
        micro_batch = MicroBatch(slices, (rank_and_size()[0],), pad_to)
        return build_pack(micro_batch, of_token.__getitem__, probe.device, labels_of=of_label.__getitem__)

    def _off(self, together: Tensor, alone: list[Tensor]) -> float:
        """How far values of tokens, [1, T, ...] of a pack or [2, T, ...] of rows, are from what they are alone."""
        own = together.flatten(0, 1)
        if self.rows is not None:
            rows = zip(together, (one.shape[1] for one in alone), strict=True)
            left = self.rows.left
            own = torch.cat([row[len(row) - length :] if left else row[:length] for row, length in rows])
        return difference(own, torch.cat([one.flatten(0, 1) for one in alone]))

    def _refuse_own_rows(self, probe: ProbeModel, alone: list[ProofRun]) -> None:
        """Raise EvenloadError where the script's rows compute their samples otherwise than each alone."""
        row = probe.run(self._side_by_side(probe))
        pairs = [("gradients at the embeddings", *gradients) for gradients in by_embedding(row, alone)]
        if logits := _all_logits(row, alone):
            pairs.insert(0, ("logits", *logits))
        for what, together, parts in pairs:
            of_row = torch.split(together.flatten(0, 1), [one.shape[1] for one in parts])
            # A loop may divide the loss by the targets of a row: of gradients the direction counts.
            off = max(difference(_unit(own), _unit(one.flatten(0, 1))) for own, one in zip(of_row, parts, strict=True))
            if not off <= probe.tolerance:
                raise EvenloadError(
                    "the script's own rows let their samples see each other, and packs do not",
                    f"{what} of a {probe.name} off by {off:.1e} from each sample alone, "
                    f"{probe.tolerance:g} is rounding",
                    "pass use_cache=False to the model, or use an attention that keeps packed samples apart "
                    "(`evenload audit` shows which rows); then samples are trained alone, as under packs",
                )

    def _refuse_other_attention(self, probe: ProbeModel, packed: ProofRun) -> None:
        config = probe.model.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None) or 1
        calls, forwards = packed.calls["attention"], packed.calls["forwards"]
        if calls != layers * forwards and not probe.mixers:
            raise EvenloadError(
                UNREACHED,
                f"{calls} calls in {forwards} forward of a {probe.name} with {layers} layers",
            )
        longest = max(one.shape[1] for one in self.samples)
        if packed.calls["positions"] > longest:
            raise EvenloadError(
                "positions of its own, and rotary tables that depend on the largest of a batch",
                f"a {probe.name} counts to {packed.calls['positions']} in a pack whose longest sample has {longest} "
                "tokens",
            )

    def _refuse_other_tokens(self, probe: ProbeModel, planned: ProofRun, what: str, off: float) -> None:
        """Raise EvenloadError where tokens are computed otherwise than alone: of a pack it says whether the second
        sample feels the tokens of the first."""
        if off <= probe.tolerance:
            return
        why = "a sample has other results among other rows and padding than alone"
        if self.rows is None:
            first, second = self.samples
            moved = probe.run(self._together([torch.stack([first[0].flip(0), first[1]]), second], probe)).gradients
            of_second = [
                [one.flatten(0, 1)[first.shape[1] :] for one in pair]
                for pair in zip(moved, planned.gradients, strict=True)
            ]
            crosses = any(difference(own, wanted) > probe.tolerance for own, wanted in of_second)
            why = (
                "attention that looks across the samples of a pack"
                if crosses
                else "positions of its own: a sample in a pack is computed at other positions than alone"
            )
        probe.refuse_far(why, what, off)

    def _may_cut(self, probe: ProbeModel, packed: ProofRun) -> bool:
        """Whether samples may be cut: the target of a slice's last token stands in ``shift_labels`` alone, and only
        Transformers' own models are known to look at earlier tokens by attention alone."""
        known = type(probe.model).forward.__module__.startswith("transformers.")
        if self.rows is not None or self.parts.form or not known:
            return False
        try:
            return self._halves(probe, packed, labels=IGNORE)
        except Exception:  # of code that nobody here has seen
            return False

    def _halves(self, probe: ProbeModel, planned: ProofRun, **others: int) -> bool:
        """Whether the loss of both samples halves where the batch has twice as many targets, other tensors of the batch
        overwritten."""
        batch = self._together(self.samples, probe)
        batch |= {name: torch.full_like(batch[name], value) for name, value in others.items()}
        halved = probe.run(batch, 2.0, backward=False).loss
        return abs(2 * halved - planned.loss) <= _LINEAR * abs(planned.loss)


def prove_trainer(trainer: Any, pair: SamplePair, num_items: Any, *, loss: PackLoss | None = None) -> Proof:
    """Whether samples of a Trainer can be regrouped, by its ``compute_loss``. Collective.

    The method runs on a copy of the Trainer that logs nothing, so that what it counts begins with the first step; once
    as it does now, and once as in the run's last step.

    Args:
        num_items: targets of the step as the Trainer counts them, of the type it does; None: it takes means of batches.
        loss: weighs tokens by the batch that they came in; None: one number divides all.
    """
    twin = twin_of(trainer)
    compute = _compute_of(trainer, twin, pair, num_items, loss)
    with nullcontext() if loss is None else loss.in_place(inner_model(trainer)):
        proof = prove(pair.experiment, probe_of(trainer, pair.row, compute))
        if proof.fault is not None:
            return proof
        # A loss may go by the step: a curriculum, a penalty that begins later.
        twin.state.global_step, twin.state.epoch = max(trainer.state.max_steps - 1, 0), trainer.args.num_train_epochs
        late = prove(pair.experiment, probe_of(trainer, pair.row, compute)).fault
    if late is None:
        return proof
    return Proof(EvenloadError(f"at the last step, {late.what}", late.found, late.do))


def prove_shared(
    trainer: Any, pair: SamplePair, calls: PackCalls, num_items: Any, *, loss: PackLoss | None = None
) -> EvenloadError | None:
    """Why samples of a pack do not share what they begin with; None: that is exact. Arguments as of `prove_trainer`,
    of a pair that begins alike. Collective."""
    compute, packs = _compute_of(trainer, twin_of(trainer), pair, num_items, loss), list[PackedRows]()

    def planned(probe: ProbeModel) -> Batch:
        packs.clear()
        batch = pair._together(pair.samples, probe)
        calls.share(batch[attention.PACK], [one[0].numpy() for one in pair.samples].__getitem__)
        return batch

    def compare(probe: ProbeModel, alone: list[ProofRun], together: ProofRun) -> Proof:
        if len(packs) != 1:
            raise EvenloadError("samples of a pack do not share what they begin with", f"{len(packs)} calls, not 1")
        probe.refuse_other_sum("a pack", alone, together)
        for own, parts in by_embedding(together, alone):
            wanted = packs[0].added_up(torch.cat(parts, 1))
            own_TH, wanted_TH = packs[0].rows_of(own)[0], wanted[0]
            probe.refuse_far("a shared beginning", "gradients", difference(own_TH, wanted_TH))
        return Proof(None)

    experiment = Experiment("a pack", pair._stock, planned, compare, within=partial(calls.running, packs))
    with nullcontext() if loss is None else loss.in_place(inner_model(trainer)):
        return prove(experiment, probe_of(trainer, pair.row, compute)).fault


def _compute_of(trainer: Any, twin: Any, pair: SamplePair, num_items: Any, loss: PackLoss | None) -> Compute:
    """The loss and outputs of a pair by a copy of the Trainer."""
    model, targets = trainer.accelerator.unwrap_model(trainer.model), sum(map(num_targets, pair.samples))

    def compute(batch: Batch, times: float) -> Call:
        counted = None if num_items is None else num_items * 0 + int(targets * times)
        is_pack = attention.PACK in batch
        if loss is not None and is_pack:
            loss.weights_1T = weights_of(pair.samples, times, counted).to(batch["input_ids"].device)
        batch = batch if is_pack else twin._prepare_inputs(batch)
        with twin.compute_loss_context_manager(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of an argument that is ours and not the script's
            result = twin.compute_loss(model, batch, return_outputs=True, num_items_in_batch=counted)
        if loss is not None:
            loss.refuse_unused()
        return Call(*result) if isinstance(result, tuple) else Call(result, None)

    return compute


def _all_logits(together: ProofRun, alone: list[ProofRun]) -> tuple[Tensor, list[Tensor]] | None:
    """Logits of a run of both samples and of those of each; None where some run has none."""
    logits = [one.logits for one in alone if one.logits is not None]
    return (together.logits, logits) if together.logits is not None and len(logits) == len(alone) else None


def _unit(values: Tensor) -> Tensor:
    unit: Tensor = values.double() / values.double().norm().clamp(min=1e-300)
    return unit
