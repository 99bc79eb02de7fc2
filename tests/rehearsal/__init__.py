"""CUDA rehearsed on a machine without it: tensors stay in host memory and are known, by storage, to lie on a device.

`install` makes `torch.cuda.is_available()` true, so Megatron-Core, DeepSpeed, Transformers and evenload take the
branches that they take on a GPU; gloo and the CPU's kernels do the work underneath. What CUDA, NCCL and the kernels
would refuse is refused here in the same place; what they would silently get wrong is a wrong number.

    storages  which storages lie on the device
    functions what a program asks of a tensor: its device, a move, a pinned copy (a TorchFunctionMode)
    ops       what runs: ops that mix devices, waits of the host, copies, work of side streams (a TorchDispatchMode)
    streams   streams that run as late as they may
    driver    the answers of `torch.cuda`
    clocks    what happens before what, and who touched which bytes when
    groups    collectives and messages, as NCCL carries them
    nccl      its rules, and whether what all ranks have asked for can come to its end
    aborts    what becomes of ranks whose peer is gone
    kernels   kernels that only CUDA has, computed by a reference, refusing what they refuse
    ledger    what was seen, by line, written at the end of every rank
"""

from .driver import install

__all__ = ["install"]
