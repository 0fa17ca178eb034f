"""Which errors of a device end one step, which end the engine, and what is freed after them."""

from __future__ import annotations

import torch

from beheld.core.errors import EngineDeadError
from beheld.platform.registry import PLATFORMS, platform_of
from beheld.utils.frames import clear_frames


def loss_of(error: Exception, device: torch.device) -> EngineDeadError | None:
    """The error to raise instead of `error` if the device is lost with it; None if other steps can go on.

    Every platform is asked: a user's logits processors may compute on another device than the model. If the message is
    not enough, the device itself is asked, which waits for it; after a failed step that costs nothing.
    """
    for platform in PLATFORMS.values():
        said = platform.fault(error, device)
        if said is not None:
            first = (said.strip().splitlines() or ["no reason given"])[0].rstrip(".")
            return EngineDeadError(f"The device has failed: {first}.", "Restart the engine.")
    return None


def let_go(error: Exception, device: torch.device) -> None:
    """Free what the failed attempt took on `device`, so that the next one has as much memory."""
    clear_frames(error)
    platform = platform_of(device)
    if platform.is_out_of_memory(error):
        # The next attempt may need in one piece what is free in many.
        platform.empty_cache()
