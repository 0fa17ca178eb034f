"""The side of transformers: its processor, its model, its generate().

Where transformers cannot read a checkpoint's layout, its own classes are given what beheld's loader makes of the files;
the trace says so.

Shapes: T tokens, X position axes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from beheld.checkpoint.adapters import built_in
from beheld.checkpoint.info import read_config, read_info
from beheld.checkpoint.resolve import fetch_weights, resolve
from beheld.core.config import EngineArgs, ModelInfo
from beheld.core.errors import ModelError
from beheld.families import registry
from beheld.models.load import converted_weights, model_class_of
from beheld.verify import decoding, joined
from beheld.verify.given import Processor
from beheld.verify.trace import Question, Trace

# What a processor says of images, by the names that methods have for it.
_OF_PICTURES = frozenset({"pixel_values", "image_sizes"})
# What a processor says of a prompt as a whole, not of an item.
_OF_THE_PROMPT = (
    "input_ids",
    "attention_mask",
    "token_type",
    "mm_token",
    "moe_mm_token",
    "position_ids",
    "labels",
    "batch_num",
)

T = TypeVar("T")


class Reference:
    """transformers' model and processor of the checkpoint of `args`, on the CPU, in `args.dtype`.

    Raises:
        ModelError: transformers cannot load them.
    """

    def __init__(self, args: EngineArgs) -> None:
        path = resolve(args)
        hf_config = read_config(path, args)
        self._info = read_info(path, args, hf_config)
        self._options = registry.facts(self._info.family).reference
        fetch_weights(args, path)
        self._args = args
        self._model, self._converted = _told(lambda: _model(hf_config, self._info, args))
        self._adapter: str | None = None
        self._processor = _told(lambda: Processor(self._info, args))

    def trace(self, question: Question) -> Trace:
        """Record what transformers makes of the question.

        Raises:
            ModelError: it cannot answer.
        """
        return _told(lambda: self._trace(question))

    def _trace(self, question: Question) -> Trace:
        model, info, made = self._model, self._info, self._begun()
        question = decoding.by_transformers(question, self._args, made)
        self._adapt(question)
        kinds = list(question.media)
        inputs = self._of_model(self._processor.inputs(question, made))
        made.prompt_ids = tuple(inputs["input_ids"][0].tolist())
        if self._options.joins_media and {"image", "video"} <= set(kinds):
            return self._trace_joined(question, inputs, made)
        made.features = _features([inputs])
        if info.is_encoder_decoder:
            # The encoder reads the prompt; the decoder begins with the token that starts every answer.
            made.features["input_ids"] = [inputs["input_ids"]]
            assert info.decoder_start_id is not None
            made.prompt_ids = (info.decoder_start_id,)
        with torch.inference_mode():
            if not info.is_encoder_decoder:
                made.encoded = self._encoded(question, inputs)
            speaker = model.language_model if self._options.text_model_alone and not question.media else model
            _answer(speaker, info, inputs, question.max_tokens, made)
        for kind in kinds:
            rows = _placed(made, info, kind, kinds)
            if kind not in made.encoded and rows is not None:
                made.encoded[kind] = rows
        return made

    def _trace_joined(self, question: Question, whole: dict[str, Any], made: Trace) -> Trace:
        """As `_trace`, of a prompt that the model's own generate() refuses as a whole: see joined.py."""
        model, info = self._model, self._info
        items = self._items(question)
        made.features = _features([inputs for _, inputs in items])
        with torch.inference_mode():
            parts, place = joined.embeddings(model, items), info.placeholder_ids["image"]
            prompt = joined.inputs(model, whole, parts, place, added=self._options.adds_to_placeholder)
            _answer(model, info, prompt, question.max_tokens, made)
        assert made.embeds_TH is not None
        placed = made.embeds_TH[torch.tensor(made.prompt_ids) == place].split([len(part) for part in parts])
        for kind in question.media:
            made.encoded |= _by_kind(items, placed if kind in self._options.completed_later else parts, (kind,))
        return made

    def _items(self, question: Question) -> list[joined.Item]:
        return [(kind, self._of_model(inputs)) for kind, inputs in self._processor.items(question)]

    def _encoded(self, question: Question, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """What the model's own methods make of the media, by kind."""
        kinds = list(question.media)
        if {"image", "video"} <= set(kinds) and "pixel_values_videos" not in inputs:
            # The processor gives frames as images, among which nothing tells them from the others.
            items = self._items(question)
            return _by_kind(items, joined.embeddings(self._model, items), ("image", "video"))
        return _encoded(self._model, self._info, inputs, kinds)

    def _of_model(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The processor's outputs, in the model's type where they are no whole numbers."""
        return {
            name: value.to(self._model.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }

    def _begun(self) -> Trace:
        """A trace of nothing yet but what the model is like."""
        text = self._model.config.get_text_config(decoder=True)
        # Learned positions count from the table's beginning, and queries of some models grow with theirs.
        grow = getattr(text, "attn_temperature_tuning", None)
        return Trace(converted=self._converted, shiftable=bool(getattr(text, "rope_parameters", None)) and not grow)

    def _adapt(self, question: Question) -> None:
        """Put the adapter in that the checkpoint brings for the question's media, or take out the one before."""
        found = next(iter(built_in(self._info, tuple(question.media)).values()), None)
        wanted = None if found is None else found.request.lora_name
        if wanted == self._adapter:
            return
        # One at a time: two that hang on one layer would need to be told apart there.
        if self._adapter is not None:
            self._model.delete_adapter(self._adapter)
        if found is not None:
            self._model.load_adapter(found.request.lora_path, adapter_name=wanted)
        self._adapter = wanted
        self._model.eval()


def _told(act: Callable[[], T]) -> T:
    """What `act` gives; what goes wrong in transformers as one line of ours."""
    try:
        return act()
    except (OSError, ValueError, TypeError, AttributeError, ImportError, LookupError, RuntimeError) as error:
        text = str(error).strip().splitlines()
        raise ModelError(f"transformers cannot answer: {text[0] if text else type(error).__name__}") from error


def _model(hf_config: Any, info: ModelInfo, args: EngineArgs) -> tuple[Any, str]:
    """transformers' model, set to greedy answers, and in words what was converted for it."""
    from transformers import GenerationConfig

    hf_config, weights, words = converted_weights(hf_config, info)
    # Soft caps are computed by transformers' eager attention alone.
    capped = getattr(hf_config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    model: Any = model_class_of(info, hf_config).from_pretrained(
        info.path if weights is None else None,
        state_dict=weights,
        config=hf_config,
        attn_implementation="eager" if capped else registry.facts(info.family).reference.attention,
        dtype=getattr(torch, args.dtype),
        trust_remote_code=args.trust_remote_code,
    )
    # The checkpoint's own defaults (sampling, penalties) must not take part.
    plain = GenerationConfig(do_sample=False, pad_token_id=0)
    if info.is_encoder_decoder:
        # What such a checkpoint does to every answer is part of the answer.
        plain = GenerationConfig.from_pretrained(info.path)
        plain.update(num_beams=1, do_sample=False, early_stopping=False, eos_token_id=None)
    _make_room(model, max(info.placeholder_ids.values(), default=0))
    parts: list[Any] = [model, getattr(model, "language_model", None)]
    for part in parts:
        if hasattr(part, "generation_config"):
            part.generation_config = plain
    return model.eval(), words


def _features(made: Sequence[Mapping[str, Any]]) -> dict[str, list[Tensor]]:
    """Tensors by name that say something of items: one from each of `made` that has it."""
    found: dict[str, list[Tensor]] = {}
    for inputs in made:
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.numel() and not name.startswith(_OF_THE_PROMPT):
                found.setdefault(name, []).append(value)
    return found


def _by_kind(items: list[joined.Item], rows: Sequence[Tensor], kinds: Sequence[str]) -> dict[str, Tensor]:
    """The rows (E, H) of all items of each kind, one after the other."""
    own = {kind: [row for (of, _), row in zip(items, rows, strict=True) if of == kind] for kind in kinds}
    return {kind: torch.cat(found) for kind, found in own.items()}


def _make_room(model: Any, most: int) -> None:
    """Give the table of embeddings rows of zeros up to the id `most`, where a placeholder lies behind it.

    Placeholders are looked up before what is seen takes their places. The head keeps its own table.
    """
    table = model.get_input_embeddings().weight
    missing = most + 1 - table.shape[0]
    if missing > 0:
        longer = torch.nn.Parameter(torch.cat([table.data, table.new_zeros(missing, table.shape[1])]), False)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.weight is table:
                module.weight = longer


def _encoded(model: Any, info: ModelInfo, inputs: dict[str, Any], kinds: list[str]) -> dict[str, Tensor]:
    """What the model's own methods make of the media, by kind; without those that have no such method."""
    made = {}
    for kind in kinds:
        # Some processors give the frames of a video as images.
        as_pictures = kind == "video" and "pixel_values_videos" not in inputs
        if kind in registry.facts(info.family).reference.completed_later:
            continue
        name = f"get_{'image' if as_pictures else kind}_features"
        # Older versions of transformers call a video's pixels by the name of images'.
        own = inputs if name != "get_video_features" else {k: v for k, v in inputs.items() if k not in _OF_PICTURES}
        for method in (getattr(part, name, None) for part in (getattr(model, "model", None), model)):
            known = () if method is None else inspect.signature(method).parameters
            given = {k: v for k, v in own.items() if k in known or (k == "image_sizes" and "kwargs" in known)}
            if method is None or not given:
                continue
            output = method(**given, return_dict=True)
            # Older versions of transformers leave this empty in some families.
            if output.pooler_output is not None:
                made[kind] = _rows(output, kind)
                break
    return made


def _placed(made: Trace, info: ModelInfo, kind: str, kinds: list[str]) -> Tensor | None:
    """(E, H) of what stands in the places of this kind, of families whose models have no method that gives it.

    None where nothing stands there, since it is attended to beside the text, or where another of `kinds` stands too.
    """
    place = info.placeholder_ids.get(kind)
    shared = [info.placeholder_ids.get(each) for each in kinds].count(place) > 1
    if place is None or shared or info.cross is not None or made.embeds_TH is None:
        return None
    rows = made.embeds_TH[torch.tensor(made.prompt_ids) == place]
    return rows if len(rows) else None


def _rows(output: Any, kind: str) -> Tensor:
    """(E, H) of a tower's output, without what pads shorter audio."""
    pooled, heard = output.pooler_output, getattr(output, "attention_mask", None)
    if kind == "audio" and heard is not None and isinstance(pooled, Tensor) and heard.shape == pooled.shape[:2]:
        return pooled[heard.bool()]
    parts = pooled if isinstance(pooled, list | tuple) else [pooled]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _answer(model: Any, info: ModelInfo, inputs: dict[str, Any], max_tokens: int, made: Trace) -> None:
    """Generate, and watch what enters the decoder."""
    embed = model.get_input_embeddings()
    merges = registry.facts(info.family).reference.merges_inside

    def enters(decoder: Any, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        embeds = keywords.get("inputs_embeds")
        if embeds is None and keywords.get("input_ids") is not None and not merges:
            embeds = embed(keywords["input_ids"])
        if embeds is not None and made.embeds_TH is None:
            made.embeds_TH = embeds[0].clone()
        positions = keywords.get("position_ids")
        if positions is not None:
            made.positions.append(_axes(positions, info.position_axes))

    def enters_first(layer: Any, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if made.embeds_TH is None:
            made.embeds_TH = (given[0] if given else keywords["hidden_states"])[0].clone()

    decoder = model.get_decoder()
    hooks = [decoder.register_forward_pre_hook(enters, with_kwargs=True)]
    if merges:
        hooks.append(decoder.layers[0].register_forward_pre_hook(enters_first, with_kwargs=True))
    try:
        out = model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    made.logits = [logits[0].float() for logits in out.logits]
    made.token_ids = out.sequences[0, len(made.prompt_ids) :].tolist()


def _axes(positions: Tensor, count: int) -> Tensor:
    """(X, T) of what a decoder was given: (1, T), (X, 1, T), or (1 + X, 1, T) with plain positions first."""
    if positions.dim() == 2:
        return positions[:1].clone()
    axes = positions[:, 0]
    return axes[1:].clone() if axes.shape[0] == 1 + count else axes.clone()
