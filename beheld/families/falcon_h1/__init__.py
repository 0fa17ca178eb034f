"""Falcon-H1: every layer has attention and Mamba-2 side by side."""

from __future__ import annotations

from typing import Any

from beheld.core.config import StateShape
from beheld.families._shared.mamba.config import head_state
from beheld.families.family import Family, KnownCheckpoint, ReferenceOptions


def state_of(text: Any) -> StateShape:
    """Return what a layer of Mamba-2 keeps."""
    inner = text.mamba_expand * text.hidden_size if text.mamba_d_ssm is None else text.mamba_d_ssm
    heads, groups = text.mamba_n_heads, text.mamba_n_groups
    return head_state(heads, inner // heads, groups, text.mamba_d_state, text.mamba_d_conv)


FAMILY = Family(
    model_types=("falcon_h1",),
    tested=(
        KnownCheckpoint(
            "falcon_h1",
            "FalconH1ForCausalLM",
            "tiiuae/Falcon-H1-1.5B-Instruct",
            note="attention and Mamba-2 in every layer",
        ),
    ),
    state=state_of,
    # Its decoder multiplies embeddings that it makes of ids itself.
    reference=ReferenceOptions(merges_inside=True),
    calls=("hermes",),
    reasoning=("think",),
)
