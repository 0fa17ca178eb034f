"""Processes of torchrun that each run the same script: they meet, and agree on a seed.

Each computes the whole model, so answers are the same in all, and nothing goes from one to another in a step.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from beheld.core.errors import ConfigError

_SEED_BYTES = 16


def agreed_seed(wanted: int, seed: int) -> int:
    """Join the group of all processes, which stays for the script to use, and return the first one's seed.

    Args:
        wanted: how many processes the options speak of.

    Raises:
        ConfigError: torchrun has not started this process, or not so many.
    """
    if not dist.is_torchelastic_launched() and not dist.is_initialized():
        raise ConfigError(
            "distributed_executor_backend='external_launcher' is for processes that torchrun starts, and it has not "
            "started this one.",
            f"Run: torchrun --nproc-per-node={wanted} SCRIPT.py, or leave the option out.",
            param="distributed_executor_backend",
        )
    there = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if there != wanted:
        raise ConfigError(
            f"torchrun has started {there} processes, and the options speak of {wanted}.",
            f"Run: torchrun --nproc-per-node={wanted} SCRIPT.py.",
            param="tensor_parallel_size",
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    # A script's own group may be of GPUs alone.
    group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    assert not isinstance(group, int), "every process is in the group"
    agreed = torch.tensor(list(seed.to_bytes(_SEED_BYTES, "little", signed=True)), dtype=torch.uint8, device="cpu")
    dist.broadcast(agreed, src=0, group=group)
    return int.from_bytes(bytes(agreed.tolist()), "little", signed=True)
