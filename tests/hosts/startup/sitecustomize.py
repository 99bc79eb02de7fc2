"""Found by every Python process whose PYTHONPATH names this folder: what scripts of others need on CPUs alone.

DeepSpeed compiles an operator for inference on a CPU, half a minute at the first start of a process group. Accelerate
1.15 starts ranks without a GPU as so many jobs of one process, unless told that it is on a CPU; told so it runs plain
data parallelism where DeepSpeed or FSDP is asked for, without a word. No argument or environment variable helps.

A group of gloo that ends with the last object that holds it waits for its threads and keeps the interpreter's lock. One
that has just finished a collective may need the lock to drop its tensors: then the process stays for ever, on two busy
cores one stock loop of Accelerate in sixty (torch 2.13).

Axolotl puts the model of each of several ranks onto a GPU of the rank's number, and draws the weights of LoRA before
anything has a seed.
"""

import os
import time

import wrapt


@wrapt.when_imported("deepspeed.comm.torch")
def _without_operator(module):
    module.build_shm_op = lambda: None


@wrapt.when_imported("torch.distributed")
def _threads_first(module):
    destroy = module.destroy_process_group

    def destroy_after_threads(*words, sleep=time.sleep, **options):  # a fork forgets the names of this file
        sleep(0.2)  # without the lock
        destroy(*words, **options)

    module.destroy_process_group = destroy_after_threads


@wrapt.when_imported("accelerate.state")
def _on_cpus(module):
    start, decide = module.PartialState.__init__, module.AcceleratorState.__init__

    def start_on_cpu(self, cpu=True, **options):
        start(self, True, **options)

    def decide_with_fsdp(self, *words, fsdp_plugin=None, **options):
        decide(self, *words, fsdp_plugin=fsdp_plugin, **options)
        asked = fsdp_plugin is not None or os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if asked and self.distributed_type == module.DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = module.DistributedType.FSDP, fsdp_plugin
            module.PartialState._shared_state["distributed_type"] = self.distributed_type

    module.PartialState.__init__, module.AcceleratorState.__init__ = start_on_cpu, decide_with_fsdp


@wrapt.when_imported("axolotl.loaders.model")
def _without_gpu(module):
    place = module.ModelLoader._set_device_map_config

    def place_on_cpu(self):
        import torch

        self.cfg.device_map = {"": "cpu"}
        place(self)
        torch.manual_seed(self.cfg.seed)

    module.ModelLoader._set_device_map_config = place_on_cpu


if "HOSTS_MEASURED" in os.environ:
    import measured  # noqa: F401

if "HOSTS_MEGATRON" in os.environ:
    import megatron_lm  # noqa: F401
