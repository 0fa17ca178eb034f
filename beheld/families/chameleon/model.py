"""Chameleon: the ids that its head suppresses are on the device, where a captured pass can read them."""

from __future__ import annotations

from typing import Any

import torch

from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def adapt(model: Any, changes: Changes) -> None:
    """Turn the list of an image's ids into a tensor; a list would be copied from the host in every pass."""
    mapping = model.model.vocabulary_mapping
    # The module that translates image codes builds its table from the list at first use, which is now.
    _ = mapping.img2bpe_mapping_tensor
    changes.set(mapping, "image_tokens", torch.tensor(mapping.image_tokens, device=model.lm_head.weight.device))


MODEL = FamilyModel(adapt=adapt, towers={"image": ("model.vqmodel",)})
