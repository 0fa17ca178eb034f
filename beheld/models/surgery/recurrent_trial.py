"""States with which layers of the gated delta rule are tried before a cache exists.

A layer that is tried continues a sequence of one token: its state before is random, block 1, and what it writes is
block 2.

Shapes: those of attention/gated_delta.py, and L positions that the convolution sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from beheld.attention.backend import AttnMetadata, GroupMetadata, LayerCache, LayerKey, StateOf
from beheld.attention.context import ForwardContext, current, forward_context
from beheld.attention.gated_delta import GatedDelta
from beheld.attention.recurrent import LayerStates
from beheld.models.recurrent import RecurrentMixer

_BEFORE, _AFTER = 1, 2


def delta_mixer(layer: nn.Module) -> Any:
    """Return the layer's mixer if it has one, and it runs the gated delta rule; else None."""
    found = [part for part in layer.children() if isinstance(part, RecurrentMixer)]
    return found[0] if len(found) == 1 and isinstance(getattr(found[0], "recurrence", None), GatedDelta) else None


@contextmanager
def trial_states(layers: Iterable[nn.Module], kernels: Any) -> Iterator[None]:
    """Within the block, which is a pass, layers with the rule have states.

    Args:
        kernels: with which it is computed (delta_rule.DeltaKernels); None for torch.
    """
    mixers = [mixer for layer in layers if (mixer := delta_mixer(layer)) is not None]
    if not mixers:
        yield
        return
    device = mixers[0].conv1d.weight.device
    kv: dict[LayerKey, LayerCache] = {StateOf(mixer.layer_idx): _cache(mixer) for mixer in mixers}
    tables = torch.tensor([[_BEFORE, _AFTER]], dtype=torch.int32)
    group = GroupMetadata(torch.tensor([_AFTER], device=device), tables.to(device), None)
    lengths_B, cu_q_B1 = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([2], [0, 1]))
    metadata = AttnMetadata(1, (1,), (2,), lengths_B, cu_q_B1, (group,), block_size=1, tables=(tables.numpy(),))
    backend: Any = SimpleNamespace(delta=kernels)
    with forward_context(ForwardContext(backend, metadata, kv)):
        yield


def changed(mixer: Any) -> tuple[Tensor, Tensor]:
    """Return how the token changed the state (H, K, V), and the inputs (L - 1, C) after it, of the current pass.

    Of a state that hardly decays, the change says what a comparison of whole states would not.
    """
    cache = current().kv[StateOf(mixer.layer_idx)]
    assert isinstance(cache, LayerStates)
    return cache.states[_AFTER] - cache.states[_BEFORE], cache.inputs[_AFTER]


def _cache(mixer: Any) -> LayerStates:
    rule, weight = mixer.recurrence, mixer.conv1d.weight
    chance = torch.Generator().manual_seed(mixer.layer_idx)
    states = torch.randn(3, rule.value_heads, rule.key_dim, rule.value_dim, generator=chance)
    inputs = torch.randn(3, weight.shape[-1] - 1, weight.shape[0], generator=chance)
    return LayerStates(states.to(weight.device), inputs.to(weight.device, weight.dtype), 0)
