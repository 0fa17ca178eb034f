"""The adapter of encoders: attention both ways within each prompt of a step, and nothing is kept between steps.

Shapes are those of ModelAdapter.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from beheld.attention import packed
from beheld.attention.cross import CrossView
from beheld.core.config import ModelInfo
from beheld.core.errors import ModelError
from beheld.core.plan import EncodeItem, SpanView
from beheld.families import registry
from beheld.lora.slots import LoRASlots
from beheld.models.pooling_head import head_of
from beheld.models.surgery.linears import PackedLinear, PaddedLinear
from beheld.models.surgery.operation import Surgery
from beheld.quant.row_counts import padded_rows


class EncoderAdapter:
    """Wraps a loaded encoder of transformers.

    Its positions have two axes: the position, and the type of the token (0, or 1 in the second text of a pair).

    Args:
        surgery: the model, with all changes made to it.
        info: the checkpoint's properties.
        how: what computes attention within prompts; see select.select_tower.

    Raises:
        ModelError: the model lacks an interface.
    """

    def __init__(self, surgery: Surgery, info: ModelInfo, how: str = "torch") -> None:
        model = surgery.target.model
        self.info = self.widest = info
        self.surgery = surgery
        self.lora: LoRASlots | None = None
        self.model = model.eval().requires_grad_(False)
        self.device = next(model.parameters()).device
        text = getattr(model, "text_model", model)
        self._embedding = text.get_input_embeddings()
        self.dtype = self._embedding.weight.dtype
        self.tail_from: int | None = None
        self.tail_stores = False
        self.position_unit = 1
        self._core = text.base_model
        self._pool = head_of(model, info)
        first = registry.facts(info.family).first_position
        self._first = 0 if first is None else first(model.config)
        # Positions and types of the longest text so far, if it is one text alone: shorter ones have its first.
        self._of_one_text_2N = np.zeros((2, 0), dtype=np.int64)
        takes = inspect.signature(self._core.forward).parameters
        self._takes_types = "token_type_ids" in takes and (getattr(model.config, "type_vocab_size", 0) or 0) > 1
        # Layers that would each pad their rows get as many as they want.
        self._fills = any(isinstance(module, PackedLinear | PaddedLinear) for module in self._core.modules())
        name = packed.register(how)
        text.set_attn_implementation(name)
        if text.config._attn_implementation != name:
            raise ModelError(f"{info.architecture} does not support AttentionInterface, so it cannot be run.")

    def capture_calls(self) -> None:
        """See ModelAdapter; there are no towers."""

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return token embeddings (T, H)."""
        embeds_TH: Tensor = self._embedding(ids_T)
        return embeds_TH

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """See ModelAdapter; there are no towers."""
        assert not items, "an encoder of text was given media"
        return []

    def positions(
        self, token_ids: Sequence[int], spans: Sequence[SpanView], second: int | None = None
    ) -> tuple[np.ndarray, int]:
        """Return positions and types (2, N), not to be written: texts share them."""
        count = len(token_ids)
        if count > self._of_one_text_2N.shape[1]:
            places = np.arange(self._first, self._first + 2 * count, dtype=np.int64)
            self._of_one_text_2N = np.stack([places, np.zeros_like(places)])
            self._of_one_text_2N.flags.writeable = False
        found_2N = self._of_one_text_2N[:, :count]
        if second is not None and self._takes_types:
            found_2N = found_2N.copy()
            found_2N[1, second:] = 1
        return found_2N, self._first

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """See ModelAdapter; there are no states of media."""
        return ()

    def hidden(self, embeds_TH: Tensor, positions_XT: Tensor) -> Tensor:
        """Run one pass; return last hidden states (T, H)."""
        rows = embeds_TH.shape[0]
        extra = padded_rows(rows) - rows if self._fills else 0
        if extra:
            # These are one more prompt for attention, see attention/packed.py.
            embeds_TH, positions_XT = F.pad(embeds_TH, (0, 0, 0, extra)), F.pad(positions_XT, (0, extra))
        types = {"token_type_ids": positions_XT[1:]} if self._takes_types else {}
        with self.surgery.passing():
            output = self._core(inputs_embeds=embeds_TH.unsqueeze(0), position_ids=positions_XT[:1], **types)
        hidden_TH: Tensor = output.last_hidden_state[0, :rows]
        return hidden_TH

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """See ModelAdapter; an encoder has none."""
        raise ModelError("An encoder has no logits.")

    def pool(self, hidden_SH: Tensor) -> Tensor:
        """Return vectors or scores (S, D)."""
        with self.surgery.passing():
            return self._pool(hidden_SH)
