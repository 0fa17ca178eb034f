"""The adapter of encoders: attention both ways within each prompt of a step, and nothing is kept between steps.

On a GPU, small passes are replayed as CUDA graphs (call_graphs.py), because the host takes longer to launch the layers
than the device to run them. Tokens and prompts are filled up to few numbers, so that sizes recur:

    tokens     | prompt 0 | prompt 1 | ... | padding |        prompts after the padding are empty

Shapes are those of ModelAdapter.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from beheld.attention import packed
from beheld.attention.context import current
from beheld.attention.cross import CrossView
from beheld.core.config import ModelInfo
from beheld.core.errors import ModelError, first_line
from beheld.core.plan import EncodeItem, SpanView
from beheld.families import registry
from beheld.lora.slots import LoRASlots
from beheld.models.call_graphs import CallGraphs
from beheld.models.pooling_head import head_of
from beheld.models.surgery.linears import PackedLinear, PaddedLinear
from beheld.models.surgery.operation import Surgery
from beheld.models.surgery.parts import layers_of
from beheld.models.surgery.staged import Seams
from beheld.platform.registry import platform_of
from beheld.quant.row_counts import padded_rows
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Weights times tokens of a pass from which on it is not replayed: a millisecond of a large GPU, about as long as the
# host takes to launch six layers.
_MOST_PRODUCTS = 2e11
_FEWEST_TOKENS, _FEWEST_PROMPTS = 16, 2


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
        # A model without a decoder runs on one device.
        self.seams: Seams | None = None
        self.layers_see_embeds = False
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
        self._num_weights = sum(p.numel() for p in self._core.parameters()) - self._embedding.weight.numel()
        self._how = how
        self._call_graphs: CallGraphs | None = None
        name = packed.register(how)
        text.set_attn_implementation(name)
        if text.config._attn_implementation != name:
            raise ModelError(f"{info.architecture} does not support AttentionInterface, so it cannot be run.")

    def layers(self) -> list[nn.Module]:
        """See ModelAdapter."""
        return layers_of(self.model)

    def capture_calls(self) -> None:
        """Replay small passes of recurring sizes from now on."""
        graphs = platform_of(self.device).graphs
        assert graphs is not None
        if self._how != "torch":
            self._call_graphs = CallGraphs(graphs)

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
        if self._call_graphs is not None and rows * self._num_weights <= _MOST_PRODUCTS:
            try:
                return self._replayed(self._call_graphs, embeds_TH, positions_XT)
            except ModelError as error:
                # The model has layers that no graph holds. If it is another error, it comes again.
                logger.info("Passes are launched kernel by kernel: %s", first_line(error))
                self._call_graphs = None
        extra = padded_rows(rows) - rows if self._fills else 0
        if extra:
            # These are one more prompt for attention, see attention/packed.py.
            embeds_TH, positions_XT = F.pad(embeds_TH, (0, 0, 0, extra)), F.pad(positions_XT, (0, extra))
        return self._computed(embeds_TH, positions_XT)[:rows]

    def _computed(self, embeds_TH: Tensor, positions_XT: Tensor) -> Tensor:
        types = {"token_type_ids": positions_XT[1:]} if self._takes_types else {}
        with self.surgery.passing():
            output = self._core(inputs_embeds=embeds_TH.unsqueeze(0), position_ids=positions_XT[:1], **types)
        hidden_TH: Tensor = output.last_hidden_state[0]
        return hidden_TH

    def _replayed(self, graphs: CallGraphs, embeds_TH: Tensor, positions_XT: Tensor) -> Tensor:
        """Run one pass, filled up, by a graph if there is one."""
        bounds_B1 = current().metadata.cu_q_B1
        rows, prompts = embeds_TH.shape[0], bounds_B1.shape[0] - 1
        tokens, most = _filled_tokens(rows), _filled_prompts(prompts + 1)
        inputs = {
            "embeds": F.pad(embeds_TH, (0, 0, 0, tokens - rows)),
            "positions": F.pad(positions_XT, (0, tokens - rows)),
            "bounds": F.pad(bounds_B1, (0, most - prompts), value=tokens),
        }

        def compute(given: Mapping[str, Tensor]) -> Tensor:
            context, bounds_P1 = current(), given["bounds"]
            own = context.metadata
            # The host knows no lengths: a replay has others.
            context.metadata = dataclasses.replace(own, starts=(), lengths=(), cu_q_B1=bounds_P1, starts_B=bounds_P1)
            try:
                return self._computed(given["embeds"], given["positions"])
            finally:
                context.metadata = own

        return graphs("encoder", (tokens, most), inputs, compute)[:rows]

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """See ModelAdapter; an encoder has none."""
        raise ModelError("An encoder has no logits.")

    def pool(self, hidden_SH: Tensor) -> Tensor:
        """Return vectors or scores (S, D)."""
        with self.surgery.passing():
            return self._pool(hidden_SH)


def _filled_tokens(count: int) -> int:
    """Return a power of two, or three quarters of one."""
    size = _FEWEST_TOKENS
    while size < count:
        size *= 2
    return 3 * size // 4 if size > _FEWEST_TOKENS and count <= 3 * size // 4 else size


def _filled_prompts(count: int) -> int:
    """Return one of few numbers: empty prompts cost next to nothing."""
    size = _FEWEST_PROMPTS
    while size < count:
        size *= 4
    return size
