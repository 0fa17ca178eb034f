"""Nemotron-H and Nemotron Nano: layers of Mamba-2, attention, MLPs and experts in turn."""

from __future__ import annotations

from typing import Any

from beheld.core.config import StateShape
from beheld.families._shared.mamba.config import head_state
from beheld.families.family import Family, KnownCheckpoint


def state_of(text: Any) -> StateShape:
    """Return what a layer of Mamba-2 keeps."""
    heads, groups = text.mamba_num_heads, text.n_groups
    return head_state(heads, text.mamba_head_dim, groups, text.ssm_state_size, text.conv_kernel)


FAMILY = Family(
    model_types=("nemotron_h",),
    tested=(
        KnownCheckpoint(
            "nemotron_h",
            "NemotronHForCausalLM",
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            note="Mamba-2; layers of MLPs and of experts alone",
        ),
    ),
    state=state_of,
    calls=("qwen3_coder", "nemotron"),
    reasoning=("think",),
)
