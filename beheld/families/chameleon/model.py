"""Chameleon: the ids that its head bars lie on the device, where a captured pass can read them."""

from __future__ import annotations

from typing import Any

import torch

from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def adapt(model: Any, changes: Changes) -> None:
    """Turn the list of an image's ids into a tensor; as a list, every pass would copy it from the host."""
    mapping = model.model.vocabulary_mapping
    # What translates an image's codes is made of the list, once, at its first use: that is here.
    _ = mapping.img2bpe_mapping_tensor
    changes.set(mapping, "image_tokens", torch.tensor(mapping.image_tokens, device=model.lm_head.weight.device))


MODEL = FamilyModel(adapt=adapt, towers={"image": ("model.vqmodel",)})
