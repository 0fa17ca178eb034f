"""The adapter of transformers models, through AttentionInterface, get_*_features and get_rope_index."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from beheld.attention import hook, tower
from beheld.attention.context import current
from beheld.attention.cross import CrossView
from beheld.core.config import ModelInfo
from beheld.core.errors import ModelError, StepError
from beheld.core.plan import EncodeItem, SpanView
from beheld.families import registry
from beheld.lora.slots import LoRASlots
from beheld.models import packed, tower_calls
from beheld.models.adapter import in_positions
from beheld.models.call_graphs import CallGraphs
from beheld.models.head import Head, ModelHead
from beheld.models.hidden import form_of
from beheld.models.pooling_head import head_of
from beheld.models.rank_towers import RankTowers
from beheld.models.surgery import last_layer
from beheld.models.surgery.longrope import FAR
from beheld.models.surgery.operation import Surgery
from beheld.models.surgery.parts import core_of, layers_of, speaker_and_cores, text_model
from beheld.models.surgery.staged import Seams
from beheld.parallel.shared_items import shares_items
from beheld.platform.registry import platform_of
from beheld.utils.version import numbers_of

# Larger tower calls take the device longer than the host takes to launch them, however busy the host is.
_MOST_PATCHES = 1 << 14
_PLACES_KEPT = 128
_TYPE_IDS = {"image": 1, "video": 2, "audio": 3}


class HFAdapter:
    """Wraps a loaded transformers model; shapes are in ModelAdapter's methods.

    Args:
        surgery: the model, with all changes made to it.
        info: the checkpoint's properties.
        windows: how towers that pack windows compute attention in them; see select_tower.

    Raises:
        ModelError: the model lacks one of these interfaces; the message names it.
    """

    def __init__(self, surgery: Surgery, info: ModelInfo, windows: str = "torch") -> None:
        model = surgery.target.model
        self.info = info
        self._all_layers = info
        if surgery.target.stage is not None:
            self.info = info = surgery.target.stage.local(info)
        self.surgery = surgery
        self.lora: LoRASlots | None = surgery.target.slots
        self.model = model.eval().requires_grad_(False)
        self.device = next(model.parameters()).device
        self.dtype = model.get_input_embeddings().weight.dtype
        self._embedding = model.get_input_embeddings()
        self._core = getattr(model, "model", model.base_model)
        self._family = family = registry.model(info.family)
        self._rope_index = self._positions_of(model)
        self.position_unit = family.position_unit
        columns = family.extra_columns
        self._columns = None
        if columns is not None:
            self._columns = surgery.apply("further columns", "hooks of layers, where the family has any", columns)
        self._cross = family.cross_inputs(model) if family.cross_inputs is not None else None
        speaker, cores = model, (model,)
        if info.pooler is not None:
            cores = (core_of(model),)
        elif self._cross is None or not family.plain_head:
            # A family that runs its own layers before a plain head needs neither.
            speaker, cores = speaker_and_cores(model)
        self._hidden = form_of(family, model, cores[0], info.hidden_size, self._columns, self._cross)
        self._head: Head = model.get_output_embeddings()
        self._pool = None if info.pooler is None else head_of(model, info)
        if info.pooler is None and not family.plain_head:
            self._head = surgery.apply(
                "given states",
                "the forward of the parts around the layers, which answer the head with given hidden states",
                lambda model, changes: ModelHead(speaker, cores, changes),
            )
        self._own_features = {"audio": family.audio_features, "image": family.image_features}
        self._platform = platform_of(self.device)
        # On a GPU, where layers are compiled and steps are graphs, all tokens go through all layers.
        self.tail_from: int | None = None
        if family.tail_from is not None and self._platform.synchronous:
            self.tail_from = surgery.apply("tail", "the forward of layers that write no keys", family.tail_from)
        layers = text_model(model).layers
        self.seams: Seams | None = None
        stage = surgery.target.stage
        if stage is not None:
            self.tail_from = None
            self.seams = surgery.apply(
                "seams of stages",
                "the forward of the stage's first layer, which takes what an earlier stage sends",
                lambda model, changes: Seams(model, stage, changes),
            )
        plain = self._cross is None and (self._columns is None or family.columns_before_layers)
        whole = stage is None and self.tail_from is None and plain
        self.tail_stores = whole and last_layer.can_shorten(layers[-1])
        if self.tail_stores:
            shorten = last_layer.shorten
            surgery.apply("last layer", "its forward", lambda model, changes: shorten(layers[-1], changes))
            self.tail_from = len(layers) - 1
        ranks, shards = surgery.target.ranks, surgery.target.shards
        self._ranks: RankTowers | None = None
        # An item that ranks share out is encoded by one of them alone.
        if ranks is not None and not shares_items(surgery.target.config, info):
            self._ranks = RankTowers(ranks, cut=shards is not None and shards.cuts_towers)
        self._upload = self._platform.uploader(self.device)
        self._places: OrderedDict[Any, tuple[np.ndarray, int]] = OrderedDict()
        self._call_graphs: CallGraphs | None = None
        self._route_attention(windows)

    def _positions_of(self, model: Any) -> Callable[..., Any] | None:
        """Return the model's function for positions of several axes, or of one that repeat; None if they are plain.

        Raises:
            ModelError: the configuration and the model disagree.
        """
        if not self.info.modalities:
            return None
        found = getattr(self._core, "get_rope_index", getattr(model, "get_rope_index", None))
        name, axes = self.info.architecture, self.info.position_axes
        found_here = (getattr(module, "mrope_section", None) for module in model.modules())
        # Layers of several kinds may each have their own.
        sections = (one for each in found_here for one in (each.values() if isinstance(each, dict) else (each,)))
        own = {len(section) for section in sections if isinstance(section, list | tuple)} or {1}
        if own != {axes}:
            raise ModelError(
                f"The configuration of {name} gives positions {axes} axes, but its model has {max(own)}.",
                "Write mrope_section into the rope_scaling of config.json's text part, as the model's class reads it.",
            )
        wanted = (axes > 1 and not self._family.plain_axes) or self._family.repeats_positions
        if (found is None) == wanted:
            has = "no get_rope_index" if found is None else "a get_rope_index, for several"
            raise ModelError(f"{name} has {axes}-axis positions but {has}.")
        return found

    def _route_attention(self, windows: str) -> None:
        """Direct the text model's attention to our hook and leave the towers unchanged."""
        if self.info.is_encoder_decoder:
            # Its decoder shares a configuration with its encoder; the family's operation already directed it to the
            # hook.
            return
        if self.info.kv_groups and all(group.state is not None for group in self.info.kv_groups):
            # Recurrent layers alone: there is no attention.
            return
        name = hook.register()
        config = self.model.config
        text = config.get_text_config(decoder=True)
        routed = self.model
        if not any(getattr(config, key, None) is text for key in config.sub_configs):
            # A class around another model holds its configuration, and the text's only in it.
            routed, config = self._core, self._core.config
        if text is config:
            towers = {"vision_config", "audio_config", "codec_config"} & set(config.sub_configs)
            routed.set_attn_implementation({"": name, **dict.fromkeys(towers, "sdpa")} if towers else name)
        else:
            keys = [key for key in config.sub_configs if getattr(config, key, None) is text]
            if not keys:
                raise ModelError(
                    f"{self.info.architecture} does not list its text configuration among its sub-configurations."
                )
            routes: dict[str, Any] = {keys[0]: name}
            if self._family.packs_attention:
                towers = {"vision_config", "audio_config"} & set(config.sub_configs)
                routes |= dict.fromkeys(towers, tower.register(windows))
            # transformers gives the parts of a part what it has itself, and refuses that where they are not loaded.
            others = {key: getattr(config, key, None) for key in config.sub_configs if key not in routes}
            if _takes_nested_routes():
                routes |= {key: _as_they_are(own) for key, own in others.items() if getattr(own, "sub_configs", None)}
            routed.set_attn_implementation(routes)
        if text._attn_implementation != name:
            raise ModelError(
                f"{self.info.architecture} does not support AttentionInterface, so its attention cannot be replaced."
            )

    def layers(self) -> list[nn.Module]:
        """See ModelAdapter."""
        return layers_of(self.model)

    def capture_calls(self) -> None:
        """Capture tower calls with recurring sizes from now on."""
        assert self._platform.graphs is not None
        self._call_graphs = CallGraphs(self._platform.graphs)

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return token embeddings (T, H); some families append columns for later layers."""
        embeds_TH: Tensor = self._embedding(ids_T)
        if self._columns is None:
            return embeds_TH
        extra_TW = self._columns.of_tokens(ids_T, embeds_TH)
        if extra_TW is None:
            extra_TW = embeds_TH.new_zeros((embeds_TH.shape[0], self._columns.width))
        return torch.cat([embeds_TH, extra_TW], dim=-1)

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """Run the towers, with shared calls for items that allow it."""
        with self.surgery.passing():
            return self._encode(items) if self._ranks is None else self._ranks.encode(items, self._encode)

    def _encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        parts = [() if self._family.parts is None else self._family.parts(item) for item in items]
        if not any(parts):
            return self._encode_whole(items)
        # An item is encoded as its parts, whose embeddings are then put into their places.
        flat = [each for item, own in zip(items, parts, strict=True) for each in ([part for part, _ in own] or [item])]
        made = iter(self._encode_whole(flat))
        return [
            _merged([next(made) for _ in own], [places for _, places in own]) if own else next(made) for own in parts
        ]

    def _encode_whole(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        if self._cross is not None:
            return self._cross.encode(items)
        out: list[Tensor | None] = [None] * len(items)
        # Copied to the device item by item: joining on the host would copy once more.
        items = [replace(item, features={k: self._content(k, v) for k, v in item.features.items()}) for item in items]
        for modality, indices, options in (self._family.combine or tower_calls.combine)(items):
            if modality == "embeds":
                for i in indices:
                    embeds_EH = items[i].features["embeds"].to(self.device, self.dtype)
                    # Some are given with all columns.
                    columns = self._columns if embeds_EH.shape[-1] == self.info.hidden_size else None
                    out[i] = self._widened(embeds_EH, None if columns is None else columns.of_given(embeds_EH))
                continue
            parts = self._tower(modality, options).split([items[i].num_embeds for i in indices])
            for i, part in zip(indices, parts, strict=True):
                out[i] = part.clone() if len(indices) > 1 else part
        return [tensor for tensor in out if tensor is not None]

    def _tower(self, modality: str, options: dict[str, Any]) -> Tensor:
        """Return all embeddings of one call, concatenated: (sum of E, H)."""
        own = self._own_features.get(modality)
        if own is not None:
            return own(self.model, **{k: self._move(v) for k, v in options.items()}).to(self.dtype)
        name = f"get_{modality}_features"
        method = getattr(self.model, name, None) or getattr(self._core, name, None)
        if method is None and modality == "video":
            # Families whose video frames take image placeholders.
            method = getattr(self.model, "get_image_features", None) or getattr(self._core, "get_image_features", None)
        if method is None:
            raise ModelError(f"{self.info.architecture} has no get_{modality}_features.")
        places = ((self._core, "visual"), (self._core, "vision_tower"), (self.model, "vision_tower"))
        visual = next((getattr(part, place) for part, place in places if hasattr(part, place)), None)
        made = packed.keywords(self._family.packed, visual, options, self._upload) or {}
        stays = self._family.host_features | self._family.exact_features | made.keys()
        moved = {k: v if k in stays else self._move(v) for k, v in options.items()} | made
        known = inspect.signature(method).parameters
        if "pixel_values_videos" in moved and not known.keys() & {"pixel_values_videos", "args"}:
            # Older versions of some families name the frames like images.
            moved["pixel_values"] = moved.pop("pixel_values_videos")
        if "vision_feature_select_strategy" in known:
            # Older versions of Llama 4 require these values from the configuration; others read them.
            strategy = getattr(self.model.config.vision_config, "vision_feature_select_strategy", None)
            moved |= {"vision_feature_select_strategy": strategy} if strategy is not None else {}
        count = sum(v.shape[0] for k, v in moved.items() if k.startswith("pixel_values"))
        if self._call_graphs is None or count > _MOST_PATCHES:
            return self._pooled(modality, method, moved)
        # Tensors on the device may change from call to call; everything else determines what is launched.
        tensors = {k: v for k, v in moved.items() if isinstance(v, Tensor) and v.device == self.device}
        fixed = {k: v.flatten().tolist() if isinstance(v, Tensor) else v for k, v in moved.items() if k not in tensors}
        sizes = (modality, repr(fixed), *((k, tuple(v.shape)) for k, v in tensors.items()))
        kept = {k: moved[k] for k in fixed}
        return self._call_graphs(modality, sizes, tensors, lambda t: self._pooled(modality, method, {**kept, **t}))

    def _pooled(self, modality: str, method: Callable[..., Any], keywords: dict[str, Any]) -> Tensor:
        """Return embeddings (sum of E, H) from one call of the model's method."""
        result = method(**keywords, return_dict=True)
        pooled = self._family.embeds(self.model, modality, result)
        parts = pooled if isinstance(pooled, list | tuple) else [pooled]
        flat = [part.reshape(-1, part.shape[-1]) for part in parts]
        embeds_EH = (flat[0] if len(flat) == 1 else torch.cat(flat)).to(self.dtype)
        return self._widened(embeds_EH, self._columns.of_media(result) if self._columns is not None else None)

    def _widened(self, embeds_EH: Tensor, extra_EW: Tensor | None) -> Tensor:
        return embeds_EH if extra_EW is None else torch.cat([embeds_EH, extra_EW.to(self.dtype)], dim=-1)

    def _content(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return self._upload(value) if name in self._family.exact_features else self._move(value)

    def _move(self, value: Any) -> Any:
        return tower_calls.moved(value, self._upload, self.dtype)

    def positions(
        self, token_ids: Sequence[int], spans: Sequence[SpanView], second: int | None = None
    ) -> tuple[np.ndarray, int]:
        """Return plain positions, or the model's own."""
        count = len(token_ids)
        if self._rope_index is None or not spans:
            first = FAR if self.info.rope_switch is not None and count > self.info.rope_switch else 0
            plain = np.arange(first, first + count, dtype=np.int64) * self.position_unit
            return np.broadcast_to(plain, (self.info.position_axes, count)), first * self.position_unit
        types = np.zeros((1, count), dtype=np.int64)
        layout: dict[str, list[Any]] = {}
        for span in spans:
            place = np.arange(span.start, span.stop)
            types[0, place if span.embed_mask is None else place[np.array(span.embed_mask)]] = _TYPE_IDS[span.modality]
            for name, value in span.layout.items():
                layout.setdefault(name, []).append(value)
        if not self._family.positions_by_kind:
            return self._placed(token_ids, types, layout)
        key = (types.tobytes(), repr(layout))
        if key not in self._places:
            self._places[key] = self._placed(token_ids, types, layout)
            if len(self._places) > _PLACES_KEPT:
                self._places.popitem(last=False)
        self._places.move_to_end(key)
        return self._places[key]

    def _placed(
        self, token_ids: Sequence[int], types: np.ndarray, layout: dict[str, list[Any]]
    ) -> tuple[np.ndarray, int]:
        """Return the model's positions of tokens of these types, with items of this layout."""
        assert self._rope_index is not None
        known = inspect.signature(self._rope_index).parameters
        options = {k: _table(v) for k, v in layout.items() if k in known}
        ids = torch.tensor([list(token_ids)])
        if "attention_mask" in known:
            options["attention_mask"] = torch.ones_like(ids)
        if "mm_token_type_ids" in known:
            options["mm_token_type_ids"] = torch.from_numpy(types)
        try:
            positions, delta = self._rope_index(ids, **options)
        except (IndexError, ValueError, RuntimeError) as error:
            raise StepError(
                f"The model cannot compute positions for this prompt ({error}).",
                "Write each item's complete placeholder, as the chat template does, and no others.",
            ) from error
        unit = self.position_unit
        positions_XN = (positions[:, 0] if unit == 1 else (positions[:, 0].double() * unit).round().long()).numpy()
        last_X = positions_XN[:, -1]
        if (last_X == last_X[0]).all():
            # generate() continues from the prompt's last position. Some models' deltas continue from the largest
            # position, which may be the end of a long video before the text.
            return positions_XN, int(last_X[0]) + (1 - len(token_ids)) * unit
        return positions_XN, round(float(delta.reshape(-1)[0]) * unit)

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """Return which positions cross-attend to which item."""
        return () if self._cross is None else self._cross.cross_views(spans, num_prompt)

    def hidden(self, embeds_TH: Tensor, positions_XT: Tensor) -> Tensor:
        """Run one pass; return last hidden states (T, H), or only those of the tail's rows."""
        if self.lora is not None:
            self.lora.switch.on = current().lora is not None
        positions_XT = in_positions(positions_XT, self.position_unit)
        with self.surgery.passing():
            return self._hidden(embeds_TH, positions_XT if self.info.position_axes == 1 else positions_XT.unsqueeze(1))

    @property
    def widest(self) -> ModelInfo:
        """Return this rank's facts, with as many layers in each cache group as any stage has."""
        stage = self.surgery.target.stage
        return self.info if stage is None else stage.widest(self._all_layers)

    @property
    def layers_see_embeds(self) -> bool:
        """Whether later stages of a pipeline need the embeddings: for columns that their layers take."""
        return self._columns is not None

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Return logits (S, V)."""
        with self.surgery.passing():
            return self._head(hidden_SH)

    def pool(self, hidden_SH: Tensor) -> Tensor:
        """Return vectors or scores (S, D)."""
        assert self._pool is not None, "a model that generates has no head for pooled states"
        with self.surgery.passing():
            return self._pool(hidden_SH)


def _takes_nested_routes() -> bool:
    """Return whether `set_attn_implementation` takes a part's parts: before 5.20, it refuses them."""
    from transformers import __version__

    return numbers_of(__version__) >= (5, 20)


def _as_they_are(config: Any) -> dict[str, Any]:
    """Return the attention that a configuration and its parts have, as `set_attn_implementation` takes it."""
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    kept = {key: _as_they_are(part) for key, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **kept}


def _merged(parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Return embeddings (E, H) from those of parts; a part without the extra columns of another has zeros there."""
    width = max(part.shape[1] for part in parts)
    merged_EH = parts[0].new_zeros((sum(len(part) for part in parts), width))
    for part, own in zip(parts, places, strict=True):
        merged_EH[own.to(part.device), : part.shape[1]] = part
    return merged_EH


def _table(rows: list[Any]) -> Any:
    """Return the numbers of items as a tensor (items, numbers); as they are where some have more than others.

    What is true or false of the items is one value: it is the same for all items of a prompt that have it.
    """
    if rows[0] and isinstance(rows[0][0], bool):
        return rows[0][0]
    if len({len(row) for row in rows}) > 1:
        return rows
    made = torch.tensor(rows)
    # One number per item becomes a row.
    return made.flatten() if made.shape[-1] == 1 else made
