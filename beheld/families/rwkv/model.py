"""RWKV-4: its recurrences and MLPs on the cache.

Shapes: T tokens of a step, H hidden size, A size of the recurrence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from beheld.attention.recurrent import recur
from beheld.attention.wkv import Stateless, WeightedMean
from beheld.families.model import FamilyModel
from beheld.models.recurrent import RecurrentMixer
from beheld.models.surgery.operation import Changes

_MIXER = (
    *("time_decay", "time_first", "time_mix_key", "time_mix_value", "time_mix_receptance"),
    *("key", "value", "receptance", "output"),
)
_MLP = ("time_mix_key", "time_mix_receptance", "key", "receptance", "value")


def _mixed(now_TH: Tensor, before_TH: Tensor, share_11H: Tensor) -> Tensor:
    return torch.lerp(before_TH, now_TH, share_11H[0])


def _before(x_TH: Tensor) -> Tensor:
    """Return the weights (H, 2) of a convolution that gives the token before each."""
    # Counted down on the device: numbers of the host would make it wait.
    return torch.arange(1.0, -1.0, -1.0, device=x_TH.device).expand(x_TH.shape[1], 2)


class WeightedMeanMixer(RecurrentMixer):
    """A block's recurrence, for packed tokens of several sequences.

    Args:
        mixer: the module whose weights it takes over, under the same names.
    """

    time_decay: Tensor
    time_first: Tensor
    time_mix_key: Tensor
    time_mix_value: Tensor
    time_mix_receptance: Tensor
    key: Any
    value: Any
    receptance: Any
    output: Any

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.layer_idx = 2 * mixer.layer_id
        for name in _MIXER:
            setattr(self, name, getattr(mixer, name))

    def forward(self, hidden: Tensor, state: Any = None, use_cache: bool = False) -> tuple[Tensor, None]:
        """Compute (1, T, H) -> (1, T, H)."""
        x_TH, seen = hidden[0], []

        def inputs(before_TH: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(self.receptance(_mixed(x_TH, before_TH, self.time_mix_receptance)))
            key_TH, value_TH = (_mixed(x_TH, before_TH, each) for each in (self.time_mix_key, self.time_mix_value))
            return self.key(key_TH), self.value(value_TH)

        mean = WeightedMean(self.time_decay.float().exp(), self.time_first.float())
        out_TA = recur(self.layer_idx, x_TH, _before(x_TH), None, inputs, mean)
        mixed: Tensor = self.output(seen[0].sigmoid() * out_TA).unsqueeze(0)
        return mixed, None


class ShiftedMLP(RecurrentMixer):
    """A block's MLP, which reads the token before each, too.

    Args:
        mlp: the module whose weights it takes over, under the same names.
    """

    time_mix_key: Tensor
    time_mix_receptance: Tensor
    key: Any
    receptance: Any
    value: Any

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.layer_idx = 2 * mlp.layer_id + 1
        for name in _MLP:
            setattr(self, name, getattr(mlp, name))

    def forward(self, hidden: Tensor, state: Any = None) -> tuple[Tensor, None]:
        """Compute (1, T, H) -> (1, T, H)."""
        x_TH = hidden[0]
        before_TH = recur(self.layer_idx, x_TH, _before(x_TH), None, lambda y_TH: (y_TH,), Stateless())
        key_TI = nn.functional.relu(self.key(_mixed(x_TH, before_TH, self.time_mix_key))).square()
        gate_TH = self.receptance(_mixed(x_TH, before_TH, self.time_mix_receptance)).sigmoid()
        made: Tensor = (gate_TH * self.value(key_TI)).unsqueeze(0)
        return made, None


def _divided(block: Any) -> tuple[Any, Any]:
    """Return the layers whose weights transformers divides by a power of two, a larger one in later blocks."""
    return block.attention.output, block.feed_forward.value


def adapt(model: Any, changes: Changes) -> None:
    """Replace the parts of all blocks, and give their list its usual name; see FamilyModel.adapt."""
    decoder = model.rwkv
    if any(not each.weight.numel() for block in decoder.blocks for each in _divided(block)):
        # Stored weights are not divided, nor is what they are added to: the answer is the same, in a greater range.
        changes.set(decoder.config, "rescale_every", 0)
    # transformers' first pass would divide weights that others hold copies of by then.
    decoder._rescale_layers()
    for block in decoder.blocks:
        changes.exchange(block, "attention", WeightedMeanMixer(block.attention), _MIXER)
        changes.exchange(block, "feed_forward", ShiftedMLP(block.feed_forward), _MLP)
    # Not as a submodule: the blocks' weights would be listed twice.
    vars(decoder)["layers"] = decoder.blocks
    changes.undo_with(lambda: vars(decoder).pop("layers"))


MODEL = FamilyModel(adapt=adapt, plain_head=True)
