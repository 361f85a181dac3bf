"""What torch can compute on, and where pretrained weights are kept."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from dp_lightning.commands.doctor import Finding, judged
from dp_lightning.cores import available_cores

_GIB = 2**30
# A small network in physical batches of 128 images; WRN-16-4 takes more.
_LEAST_GPU_MEMORY = 2 * _GIB


def gpus() -> Iterator[Finding]:
    """Each GPU that torch can use."""
    if not torch.cuda.is_available():
        if torch.version.cuda is not None and Path("/proc/driver/nvidia").exists():
            yield Finding(
                "warning",
                "GPU",
                f"there is one, and torch with CUDA {torch.version.cuda} cannot use it",
                "compare the driver's version in nvidia-smi, and CUDA_VISIBLE_DEVICES",
            )
            return
        yield Finding("ok", "GPU", "none: CPU only, which is slow beyond small networks and linear probes")
        return
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        found = f"{name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, CUDA {torch.version.cuda}"
        if (major, minor) < _oldest_architecture():
            yield Finding(
                "problem",
                "GPU",
                f"{found}: this build of torch has no kernels for it",
                "install another build of torch",
            )
        else:
            fix = "end what else uses it, or lower privacy.max_physical_batch_size"
            yield judged("GPU", found, holds=free >= _LEAST_GPU_MEMORY, fix=fix)


def _oldest_architecture() -> tuple[int, int]:
    """The lowest compute capability that torch was built for."""
    numbers = [int(name.removeprefix("sm_").rstrip("af")) for name in torch.cuda.get_arch_list() if "sm_" in name]
    return divmod(min(numbers, default=0), 10)


def cores() -> Iterator[Finding]:
    """The cores that are left to this process, and torch's threads."""
    count = available_cores()
    threads = torch.get_num_threads()
    found = f"{count} cores, torch uses {threads} threads"
    fix = f"set OMP_NUM_THREADS={count}: more threads than cores slow it down"
    yield judged("cores", found, holds=threads <= count, fix=fix)


def weights() -> Iterator[Finding]:
    """Where pretrained weights are downloaded to."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for subject, variable, folder in (
        ("timm weights", "HF_HOME", Path(HF_HUB_CACHE)),
        ("torch weights", "TORCH_HOME", Path(torch.hub.get_dir())),
    ):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not os.access(there, os.W_OK):
            yield Finding("warning", subject, f"{folder} cannot be written to", f"set {variable} to another folder")
        else:
            yield Finding("ok", subject, f"{folder} ({'exists' if there == folder else 'not there yet'})")
