"""Which errors of a device end one step, which end the device for this process, and what is tidied up after them."""

from __future__ import annotations

import torch

from beheld.core.errors import EngineDeadError
from beheld.platform.registry import PLATFORMS, platform_of
from beheld.utils.frames import clear_frames


def loss_of(error: Exception, device: torch.device) -> EngineDeadError | None:
    """What to raise instead of `error` if the device is lost with it; None if other steps can go on.

    Every platform is asked: a user's logits processors may compute elsewhere than the model. Where the message does not
    tell, the device is asked; that waits for it, which costs nothing once a step has failed.
    """
    for platform in PLATFORMS.values():
        said = platform.fault(error, device)
        if said is not None:
            first = (said.strip().splitlines() or ["no reason given"])[0].rstrip(".")
            return EngineDeadError(f"The device has failed: {first}.", "Restart the engine.")
    return None


def let_go(error: Exception, device: torch.device) -> None:
    """Free what the failed attempt had taken on `device`, so that the next one has all memory that there was."""
    clear_frames(error)
    platform = platform_of(device)
    if platform.is_out_of_memory(error):
        # The next attempt, alone, may need in one piece what lies about in many.
        platform.empty_cache()
