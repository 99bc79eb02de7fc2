"""A loop on TensorDicts, which calls Megatron's schedule as verl's engine does; it knows nothing of evenload."""

import sys
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack

sys.path.append(str(Path(__file__).parent))
from megatron_script import gpt, wrapped

VOCABULARY, ROWS, ROWS_OF_MICRO_BATCH, RESPONSE, STEPS = 128, 6, 2, 12, 2


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def row(index):
    """Tokens of a prompt and a response, and what a policy said of the response, padded to RESPONSE."""
    generator = torch.Generator().manual_seed(index)
    prompt = 1 + int(24 * torch.rand((), generator=generator) ** 2)
    response = 1 + int((RESPONSE - 1) * torch.rand((), generator=generator))
    ids = torch.randint(1, VOCABULARY, (prompt + response,), generator=generator)
    mask = torch.arange(prompt + response) >= prompt
    padding = RESPONSE - response
    said = torch.cat([-5 + torch.rand(response, generator=generator), torch.zeros(padding)]).double()
    gain = torch.cat([torch.randn(1, generator=generator).expand(response), torch.zeros(padding)]).double()
    return ids, mask, said, gain


def data(index):
    rank = parallel_state.get_data_parallel_rank()
    rows = [row(1000 * index + ROWS * rank + i) for i in range(ROWS)]
    batch = TensorDict({"old_log_probs": torch.stack([r[2] for r in rows])}, batch_size=[ROWS])
    batch["advantages"] = torch.stack([r[3] for r in rows])
    batch["input_ids"], batch["loss_mask"] = nested(r[0] for r in rows), nested(r[1] for r in rows)
    batch["uid"] = NonTensorStack.from_list([NonTensorData({"row": f"{rank}.{i}"}) for i in range(ROWS)])
    return batch


def chunked(batch):
    """Micro-batches of equally many rows, in verl's manner."""
    ragged = {key: batch[key].unbind() for key in ("input_ids", "loss_mask")}
    parts = batch.exclude(*ragged).chunk(ROWS // ROWS_OF_MICRO_BATCH)
    for place, part in enumerate(parts):
        here = slice(place * ROWS_OF_MICRO_BATCH, (place + 1) * ROWS_OF_MICRO_BATCH)
        for key, rows in ragged.items():
            part[key] = nested(rows[here])
    return parts


def packed(rows, roll=False):
    """Rows side by side, each padded to a multiple of the tensor-parallel size: [1, T], and where they lie."""
    multiple = parallel_state.get_tensor_model_parallel_world_size()
    lengths = [len(one) for one in rows]
    places = list(accumulate((n + -n % multiple for n in lengths), initial=0))
    out = torch.zeros(places[-1], *rows[0].shape[1:], dtype=rows[0].dtype)
    for start, one in zip(places, rows, strict=False):
        out[start : start + len(one)] = one.roll(-1, 0) if roll else one
    borders = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
    physical = torch.tensor(places, dtype=torch.int32)
    longest = int((physical[1:] - physical[:-1]).max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=physical,
        cu_seqlens_kv_padded=physical,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return out[None], params


def sft_loss(model_output, data):
    """Divided by what is the whole step's."""
    mask = torch.roll(data["loss_mask"].values(), -1, 0)
    total = (model_output["log_probs"].values() * mask).sum()
    return -total / data["batch_num_tokens"] * data["dp_size"]


def mean_loss(model_output, data):
    """Divided by the tokens of the micro-batch."""
    return sft_loss(model_output, data) * data["batch_num_tokens"] / data["loss_mask"].values().sum()


def ppo_loss(model_output, data, by_row=False):
    """A clipped policy gradient, a mean over the step's response tokens or over the means of its rows."""
    total = 0.0
    for place, (log_probs, mask) in enumerate(
        zip(model_output["log_probs"].unbind(), data["loss_mask"].unbind(), strict=True)
    ):
        said = log_probs[:-1][mask[1:]]
        old, gain = (data[key][place][: len(said)] for key in ("old_log_probs", "advantages"))
        ratio = (said - old).clamp(-1, 1).exp()
        losses = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.2))
        total = total + (losses.mean() if by_row else losses.sum())
    return total / data["global_batch_size" if by_row else "batch_num_tokens"] * data["dp_size"]


LOSSES = {"sft": sft_loss, "ppo": ppo_loss, "ppo by row": partial(ppo_loss, by_row=True), "mean": mean_loss}


def forward_step(batch_iter, model, loss_function, shapes):
    batch = next(batch_iter)
    batch = batch.to("cpu")
    rows = batch["input_ids"].unbind()
    ids, params = packed(rows)
    shapes.append(tuple(ids.shape))
    output = model(input_ids=ids, attention_mask=None, position_ids=None, packed_seq_params=params)
    if parallel_state.is_pipeline_last_stage():
        labels, _ = packed(rows, roll=True)
        losses = vocab_parallel_cross_entropy(output.transpose(0, 1).contiguous(), labels.transpose(0, 1).contiguous())
        starts = params.cu_seqlens_q_padded.tolist()
        output = nested(-losses[a : a + len(one), 0] for a, one in zip(starts, rows, strict=False))
    return output, partial(postprocess, data=batch, model=model, loss_function=loss_function)


def postprocess(output, data, model, loss_function):
    loss = loss_function({"log_probs": output}, data)
    scaled_loss = loss * data["num_micro_batch"]
    report = {"loss": loss.detach().item(), "model_output": {"log_probs": output.detach()}, "metrics": {}}
    if model.config.calculate_per_token_loss:
        num_tokens = torch.tensor(sum(len(one) for one in data["input_ids"].unbind()), dtype=torch.int)
        return loss * data["routed_num_tokens"] / data["dp_size"], num_tokens, report
    return scaled_loss, report


def forward_backward_batch(batch, model, loss_function, shapes):
    """One step on this rank's part: its losses and what the model said of each row, in the rows' order."""
    group = parallel_state.get_data_parallel_group()
    counts = torch.tensor([batch["loss_mask"].values().sum(), batch["input_ids"].values().numel()])
    torch.distributed.all_reduce(counts, group=group)
    size = parallel_state.get_data_parallel_world_size()
    micro_batches = chunked(batch)
    for micro_batch in micro_batches:
        micro_batch["batch_num_tokens"] = NonTensorData(int(counts[0]))
        micro_batch["routed_num_tokens"] = NonTensorData(int(counts[1]))
        micro_batch["global_batch_size"], micro_batch["dp_size"] = NonTensorData(size * ROWS), NonTensorData(size)
        micro_batch["num_micro_batch"] = NonTensorData(len(micro_batches))
    reports = get_forward_backward_func()(
        forward_step_func=partial(forward_step, loss_function=loss_function, shapes=shapes),
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    said = [row for report in reports for row in report["model_output"]["log_probs"].unbind()]
    if reports:
        assert [len(one) for one in said] == [len(one) for one in batch["input_ids"].unbind()]
    return sum(report["loss"] for report in reports if "loss" in report), said


def build(per_token):
    own = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    return wrapped(*gpt(torch.float64, 64, VOCABULARY, calculate_per_token_loss=per_token, **own))


def train(loss, per_token=False):
    """Gradients of the last of some steps, this rank's losses, what was said of its rows, and what was computed."""
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    model, losses, shapes = build(per_token), [], []
    for step in range(STEPS):
        model.zero_grad_buffer()
        total, said = forward_backward_batch(data(step), model, LOSSES[loss], shapes)
        losses.append(total)
        gradients = {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
        with torch.no_grad():
            for name, p in model.module.named_parameters():
                p -= 0.1 * gradients[name]
    return {"losses": losses, "said": said, "shapes": shapes, "gradients": gradients}
