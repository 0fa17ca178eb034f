"""Ling 3.0: mixers of Kimi's delta attention, the gate of whose output is one layer."""

from __future__ import annotations

from typing import Any

from beheld.families.kimi_linear.model import ChannelDeltaMixer, replace_mixers
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class OneGateMixer(ChannelDeltaMixer):
    """See ChannelDeltaMixer."""

    gates = ("g_proj",)


def adapt(model: Any, changes: Changes) -> None:
    """Replace the mixers; see FamilyModel.adapt."""
    replace_mixers(model, changes, OneGateMixer)


MODEL = FamilyModel(adapt=adapt, plain_head=True)
