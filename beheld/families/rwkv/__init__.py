"""RWKV-4: no attention; each block has a recurrence and an MLP, both of which mix a token with the one before it.

In the cache a block counts as two layers, its recurrence and its MLP: each keeps the last token's inputs. Both have the
state of the recurrence, which the MLP does not use.
"""

from __future__ import annotations

from typing import Any

from beheld.core.config import KVGroup, StateShape
from beheld.families.family import Family


def _kv_groups(config: Any) -> tuple[KVGroup, ...]:
    """Return one group of all blocks' recurrences and MLPs."""
    state = StateShape((3, config.attention_hidden_size), config.hidden_size, 2)
    return (KVGroup("recurrent", tuple(range(2 * config.num_hidden_layers)), 0, 0, 0, state=state),)


FAMILY = Family(
    model_types=("rwkv",),
    kv_groups=_kv_groups,
)
