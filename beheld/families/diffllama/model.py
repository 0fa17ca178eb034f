"""DiffLlama: one attention over values side by side in place of transformers' two with the same queries and keys.

Shapes: T tokens of a step, H hidden size, J heads of keys and values, M heads of queries, K size of a head, V twice
that.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model


def attend(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute (1, T, H) -> (1, T, H): the first half of the heads less the share `lambda` of the second.

    A head of keys takes its values from a head of the first half and one of the second.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.diffllama.modeling_diffllama import apply_rotary_pos_emb

    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q_1MTK = self.q_proj(hidden_states).view(shape).transpose(1, 2)
    k_1JTK = self.k_proj(hidden_states).view(shape).transpose(1, 2)
    v_1JTK = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    q_1MTK, k_1JTK = apply_rotary_pos_emb(q_1MTK, k_1JTK, *position_embeddings)
    both_1JTV = torch.cat([half.repeat(1, 2, 1, 1) for half in v_1JTK.chunk(2, dim=1)], dim=-1)
    hook = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    out_1TMV, _ = hook(self, q_1MTK, k_1JTK, both_1JTV, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
    first, second = out_1TMV.chunk(2, dim=2)
    gains = [
        (q_K * k_K).sum(-1, dtype=torch.float32).exp().to(q_1MTK.dtype)
        for q_K, k_K in ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
    ]
    mixed = first - (gains[0] - gains[1] + self.lambda_init) * second
    normed = (1 - self.lambda_init) * self.groupnorm(mixed)
    made: Tensor = self.o_proj(normed.reshape(*hidden_states.shape[:-1], -1))
    return made, None


def adapt(model: Any, changes: Changes) -> None:
    """Replace what the layers' attention computes; see FamilyModel.adapt."""
    for layer in text_model(model).layers:
        changes.set(layer.self_attn, "forward", MethodType(attend, layer.self_attn))


MODEL = FamilyModel(adapt=adapt)
