"""Megatron-LM's ``--sft`` and Megatron-Bridge's packed fine-tuning, as plain loops: they know nothing of evenload.

torchrun --nproc-per-node 2 sft_script.py --out FOLDER [--forms sft bridge ...] [--dtype fp64] [--pp 2] [--tp 2]
"""

import argparse
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

sys.path.append(str(Path(__file__).parent))
from megatron_script import begin, end, gpt, wrapped

SEQ_LENGTH, VOCABULARY, NUM_MICRO_BATCHES, STEPS = 64, 128, 3, 2
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


def conversation(generator):
    """Tokens, and which of them an assistant says: a prompt, then an answer, of some length."""
    length = int(3 + (SEQ_LENGTH // 2) * torch.rand((), generator=generator) ** 2)
    tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
    return tokens, torch.arange(length) >= length // 4


def row(index, multiple=1):
    """One row of conversations side by side, padded to SEQ_LENGTH, where they lie, and how long they are there."""
    generator = torch.Generator().manual_seed(index)
    tokens, said = torch.zeros(SEQ_LENGTH + 1, dtype=torch.int64), torch.zeros(SEQ_LENGTH + 1, dtype=torch.bool)
    places, lengths, positions = [0], [], torch.zeros(SEQ_LENGTH, dtype=torch.int64)
    for _ in range(1 + index % 4):
        text, answers = conversation(generator)
        if places[-1] + len(text) > SEQ_LENGTH - 8:
            break
        here = slice(places[-1], places[-1] + len(text))
        tokens[here], said[here] = text, answers
        lengths.append(len(text))
        places.append(here.stop + -here.stop % multiple)
    places[-1] = SEQ_LENGTH
    for start, stop in pairwise(places):
        positions[start:stop] = torch.arange(stop - start)
    fields = dict(zip(FIELDS, (tokens[:-1], tokens[1:], said[1:].float(), positions), strict=True))
    return fields, torch.tensor(places, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)


def longest(borders):
    return (borders[1:] - borders[:-1]).max()


def filled(borders, filling):
    return torch.cat([borders, torch.full((6 - len(borders),), filling, dtype=torch.int32)])


def batch(form, index):
    """A micro-batch of one row, or of two, in one of the forms that loaders have."""
    if form == "sft":
        fields, places, _ = row(index)
        return collate([{**fields, "cu_seqlens": places, "max_seqlen": longest(places)}])
    if form == "sft, two rows":
        rows = [row(2 * index), row(2 * index + 1)]
        return collate(
            [{**f, "cu_seqlens": filled(places, SEQ_LENGTH), "max_seqlen": longest(places)} for f, places, _ in rows]
        )
    fields, places, lengths = row(index, 4)
    inside = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    fields["loss_mask"][inside_padding(places, lengths)] = 0.0
    if form == "bridge":
        pairs = {"cu_seqlens_q": inside, "cu_seqlens_kv": inside}
        pairs |= {"cu_seqlens_q_padded": places, "cu_seqlens_kv_padded": places}
        pairs |= {"max_seqlen_q": longest(places)[None], "max_seqlen_kv": longest(places)[None]}
        return {**collate([{**fields, **pairs}]), "attention_mask": None, "token_count": [int(lengths.sum())]}
    pairs = {"cu_seqlens": filled(places, -1), "cu_seqlens_argmin": torch.tensor([len(places)])}
    pairs |= {"cu_seqlens_unpadded": filled(inside, -1), "cu_seqlens_unpadded_argmin": torch.tensor([len(inside)])}
    return {**collate([{**fields, **pairs, "max_seqlen": longest(places)[None]}]), "attention_mask": None}


def inside_padding(places, lengths):
    padding = torch.ones(SEQ_LENGTH, dtype=torch.bool)
    for start, length in zip(places.tolist(), lengths.tolist(), strict=False):
        padding[start : start + length] = False
    return padding


def collate(rows):
    return torch.utils.data.default_collate(rows)


def batches(form):
    """This data-parallel rank's micro-batches, for ever."""
    index, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    while True:
        yield batch(form, index)
        index += ranks


def flattened(batch):
    """Rows of a micro-batch as one, as Megatron-LM does it since 0.19."""
    borders = [batch["cu_seqlens"][0]]
    borders += [one[1:] + place * SEQ_LENGTH for place, one in enumerate(batch["cu_seqlens"]) if place]
    ends = torch.cat(borders)
    ends = ends[torch.cat([torch.tensor([True]), ends[1:] > ends[:-1]])]
    return {**{name: batch[name].reshape(1, -1) for name in FIELDS}, "cu_seqlens": ends}, batch["max_seqlen"].max()


def loss_func(loss_mask, losses):
    losses, loss_mask = losses.view(-1), loss_mask.view(-1)
    loss, num_tokens = torch.sum(losses * loss_mask), loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def sft_step(shapes, data_iterator, model):
    fields, longest_one = flattened(next(data_iterator))
    shapes.append(tuple(fields["tokens"].shape))
    borders = fields.pop("cu_seqlens")
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=int(longest_one),
        max_seqlen_kv=int(longest_one),
    )
    output = model(fields["tokens"], fields["position_ids"], None, labels=fields["labels"], packed_seq_params=params)
    return output, partial(loss_func, fields["loss_mask"])


def bridge_step(state, data_iterator, model, return_schedule_plan=False):
    batch = {key: None if value is None else value for key, value in next(data_iterator).items()}
    state.append(tuple(batch["tokens"].shape))
    if "cu_seqlens_q" in batch:
        params = PackedSeqParams(
            qkv_format="thd",
            **{key: batch[key].squeeze() for key in batch if key.startswith("cu_seqlens_")},
            **{key: int(batch[key].squeeze()) for key in ("max_seqlen_q", "max_seqlen_kv")},
        )
    else:
        ends = {}
        for key in ("cu_seqlens", "cu_seqlens_unpadded"):
            ends[key] = batch[key].squeeze()[: batch[f"{key}_argmin"].item()]
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends["cu_seqlens_unpadded"],
            cu_seqlens_kv=ends["cu_seqlens_unpadded"],
            cu_seqlens_q_padded=ends["cu_seqlens"],
            cu_seqlens_kv_padded=ends["cu_seqlens"],
            max_seqlen_q=int(batch["max_seqlen"].squeeze()),
            max_seqlen_kv=int(batch["max_seqlen"].squeeze()),
        )
    forward_args = {
        "input_ids": batch["tokens"],
        "position_ids": batch["position_ids"],
        "attention_mask": batch.get("attention_mask"),
        "labels": batch["labels"],
        "packed_seq_params": params,
    }
    return model(**forward_args), partial(loss_func, batch["loss_mask"])


def build(dtype, per_token):
    return wrapped(*gpt(dtype, 2 * SEQ_LENGTH, VOCABULARY, calculate_per_token_loss=per_token, **SHAPE))


def call(form, model, data, shapes, num_microbatches=NUM_MICRO_BATCHES):
    """One training call, as Megatron-LM's ``train_step`` or Megatron-Bridge's makes it."""
    common = {"data_iterator": data, "model": [model], "num_microbatches": num_microbatches, "forward_only": False}
    common |= {"seq_length": SEQ_LENGTH, "micro_batch_size": 1, "decoder_seq_length": SEQ_LENGTH}
    if form.startswith("sft"):
        return get_forward_backward_func()(forward_step_func=partial(sft_step, shapes), **common)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    forward_backward_func = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=None)
    return forward_backward_func(
        forward_step_func=partial(bridge_step, shapes),
        **common,
        adjust_tensor_shapes_fn=None,
        p2p_communicator=P2PCommunicator(pp_group=groups.pp, config=model.config),
        pg_collection=groups,
    )


def train(form, dtype=torch.float64, per_token=True):
    """Gradients of the last of some steps of gradient descent, reports and shapes of all."""
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    model = build(dtype, per_token)
    data, reports, shapes = batches(form), [], []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        reports.append([report["lm loss"].tolist() for report in call(form, model, data, shapes)])
        gradients = {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
        with torch.no_grad():
            for name, p in model.module.named_parameters():
                p -= 0.1 * gradients[name]
    return {"reports": reports, "shapes": shapes, "gradients": gradients}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--forms", nargs="+", default=["sft"])
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    begin(args.tp, args.pp)
    results = {form: train(form, DTYPES[args.dtype]) for form in args.forms}
    torch.save(results, args.out / f"rank{torch.distributed.get_rank()}.pt")
    end()


if __name__ == "__main__":
    main()
