"""The reference's side: transformers' processor, model and generate().

If transformers cannot read a checkpoint's layout, its classes load what beheld's loader converts; the trace records it.

Shapes: T tokens, X position axes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from beheld.checkpoint.adapters import built_in
from beheld.checkpoint.info import read_config, read_info
from beheld.checkpoint.resolve import fetch_weights, resolve
from beheld.core.config import EngineArgs, ModelInfo
from beheld.core.errors import ModelError, first_line
from beheld.families import registry
from beheld.models.load import converted_weights, model_class_of
from beheld.models.load_progress import shard_bar
from beheld.tools.verify import decoding, mixed_prompts
from beheld.tools.verify.reference_processor import Processor
from beheld.tools.verify.trace import Question, Trace

# Processor outputs of images, by the parameter names of the models' methods.
_IMAGE_OUTPUTS = frozenset({"pixel_values", "image_sizes"})
# Processor outputs of a prompt as a whole, not of an item.
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
    """transformers' model and processor for the checkpoint of `args`, on the CPU, in `args.dtype`.

    Raises:
        ModelError: transformers cannot load them.
    """

    def __init__(self, args: EngineArgs) -> None:
        path = resolve(args)
        hf_config = read_config(path, args)
        self._info = read_info(path, args, hf_config)
        if self._info.encoder_reads not in ("", "prompt"):
            raise ModelError(
                f"verify does not compare {self._info.architecture}, whose encoder reads {self._info.encoder_reads}.",
                "Run pytest tests/oracle/test_whisper.py, which compares a small one.",
            )
        self._options = registry.facts(self._info.family).reference
        fetch_weights(args, path)
        self._args = args
        self._model, self._converted = _with_model_errors(lambda: _model(hf_config, self._info, args))
        self._adapter: str | None = None
        self._processor = _with_model_errors(lambda: Processor(self._info, args))

    @property
    def model(self) -> Any:
        """transformers' model."""
        return self._model

    def trace(self, question: Question) -> Trace:
        """Answer the question and return the trace.

        Raises:
            ModelError: transformers cannot answer.
        """
        return _with_model_errors(lambda: self._trace(question))

    def _trace(self, question: Question) -> Trace:
        model, info, made = self._model, self._info, self._new_trace()
        question = decoding.by_transformers(question, self._args, made)
        self._adapt(question)
        kinds = list(question.media)
        inputs = self._of_model(self._processor.inputs(question, made))
        made.prompt_ids = tuple(inputs["input_ids"][0].tolist())
        if self._options.joins_media and {"image", "video"} <= set(kinds):
            return self._trace_joined(question, inputs, made)
        made.features = _features([inputs])
        if info.is_encoder_decoder:
            # The encoder reads the prompt; the decoder starts with the token that begins every answer.
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
        """Answer a prompt that the model's generate() refuses as a whole: see mixed_prompts.py."""
        model, info = self._model, self._info
        items = self._items(question)
        made.features = _features([inputs for _, inputs in items])
        with torch.inference_mode():
            parts, place = mixed_prompts.embeddings(model, items), info.placeholder_ids["image"]
            prompt = mixed_prompts.inputs(model, whole, parts, place, added=self._options.adds_to_placeholder)
            _answer(model, info, prompt, question.max_tokens, made)
        assert made.embeds_TH is not None
        placed = made.embeds_TH[torch.tensor(made.prompt_ids) == place].split([len(part) for part in parts])
        for kind in question.media:
            made.encoded |= _by_kind(items, placed if kind in self._options.completed_later else parts, (kind,))
        return made

    def _items(self, question: Question) -> list[mixed_prompts.Item]:
        return [(kind, self._of_model(inputs)) for kind, inputs in self._processor.items(question)]

    def _encoded(self, question: Question, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the encoders' outputs for the media, by kind."""
        kinds = list(question.media)
        if {"image", "video"} <= set(kinds) and "pixel_values_videos" not in inputs:
            # This processor returns frames as images, indistinguishable from the others.
            items = self._items(question)
            return _by_kind(items, mixed_prompts.embeddings(self._model, items), ("image", "video"))
        return _encoded(self._model, self._info, inputs, kinds)

    def _of_model(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the processor's outputs, floats converted to the model's type."""
        return {
            name: value.to(self._model.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }

    def _new_trace(self) -> Trace:
        """Return a new trace with the model's properties."""
        text = self._model.config.get_text_config(decoder=True)
        # Learned positions index a table, and some models scale queries by position.
        grow = getattr(text, "attn_temperature_tuning", None)
        return Trace(converted=self._converted, shiftable=bool(getattr(text, "rope_parameters", None)) and not grow)

    def _adapt(self, question: Question) -> None:
        """Activate the adapter that the checkpoint has for the question's media, and remove the previous one."""
        found = next(iter(built_in(self._info, tuple(question.media)).values()), None)
        wanted = None if found is None else found.request.lora_name
        if wanted == self._adapter:
            return
        # One at a time: two adapters on one layer would have to be distinguished.
        if self._adapter is not None:
            _remove_adapter(self._model, self._adapter)
        if found is not None:
            self._model.load_adapter(found.request.lora_path, adapter_name=wanted)
        self._adapter = wanted
        self._model.eval()


def _remove_adapter(model: Any, name: str) -> None:
    """Remove an adapter that transformers' `load_adapter` added, through peft.

    transformers 5.24's own `delete_adapter` asks for a version of peft that is not published.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.delete_adapter(name)
    # One adapter at a time: without it the model is as if it never had one.
    del model.peft_config
    model._hf_peft_config_loaded = False


def _with_model_errors(act: Callable[[], T]) -> T:
    """Return `act`'s result; report an error in transformers as one line."""
    try:
        return act()
    except (OSError, ValueError, TypeError, AttributeError, ImportError, LookupError, RuntimeError) as error:
        raise ModelError(f"transformers cannot answer: {first_line(error)}.") from error


def _model(hf_config: Any, info: ModelInfo, args: EngineArgs) -> tuple[Any, str]:
    """Return transformers' model, set to greedy answers, and what was converted for it in words."""
    from transformers import GenerationConfig

    hf_config, weights, words = converted_weights(hf_config, info)
    # Only transformers' eager attention computes soft caps.
    capped = getattr(hf_config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    with shard_bar(Path(info.path), shown=False):
        model: Any = model_class_of(info, hf_config).from_pretrained(
            info.path if weights is None else None,
            state_dict=weights,
            config=hf_config,
            attn_implementation="eager" if capped else registry.facts(info.family).reference.attention,
            dtype=getattr(torch, args.dtype),
            trust_remote_code=args.trust_remote_code,
        )
    # The checkpoint's generation defaults (sampling, penalties) must not apply.
    plain = GenerationConfig(do_sample=False, pad_token_id=0)
    if info.is_encoder_decoder:
        # These settings of a checkpoint apply to every answer.
        plain = GenerationConfig.from_pretrained(info.path)
        plain.update(num_beams=1, do_sample=False, early_stopping=False, eos_token_id=None)
    _make_room(model, max(info.placeholder_ids.values(), default=0))
    parts: list[Any] = [model, getattr(model, "language_model", None)]
    for part in parts:
        if hasattr(part, "generation_config"):
            part.generation_config = plain
    fill_outputs(model, registry.facts(info.family).reference.asks_of_text)
    return model.eval(), words


def fill_outputs(model: Any, names: Sequence[str]) -> None:
    """Let None stand for entries that a model reads from its language model's output, where that has none of them."""

    def fill(module: Any, given: Any, output: Any) -> None:
        for name in names:
            if not hasattr(output, name):
                setattr(output, name, None)

    if names:
        model.language_model.register_forward_hook(fill)


def _features(made: Sequence[Mapping[str, Any]]) -> dict[str, list[Tensor]]:
    """Return per-item tensors by name: one from each of `made` that has it."""
    found: dict[str, list[Tensor]] = {}
    for inputs in made:
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.numel() and not name.startswith(_OF_THE_PROMPT):
                found.setdefault(name, []).append(value)
    return found


def _by_kind(items: list[mixed_prompts.Item], rows: Sequence[Tensor], kinds: Sequence[str]) -> dict[str, Tensor]:
    """Return the rows (E, H) of all items of each kind, concatenated."""
    own = {kind: [row for (of, _), row in zip(items, rows, strict=True) if of == kind] for kind in kinds}
    return {kind: torch.cat(found) for kind, found in own.items()}


def _make_room(model: Any, most: int) -> None:
    """Extend the embedding table by rows of zeros up to the id `most`, if a placeholder lies beyond it.

    Placeholders are looked up before media embeddings replace them. The head keeps its table.
    """
    table = model.get_input_embeddings().weight
    missing = most + 1 - table.shape[0]
    if missing > 0:
        longer = torch.nn.Parameter(torch.cat([table.data, table.new_zeros(missing, table.shape[1])]), False)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.weight is table:
                module.weight = longer


def _encoded(model: Any, info: ModelInfo, inputs: dict[str, Any], kinds: list[str]) -> dict[str, Tensor]:
    """Return the media features from the model's methods, by kind; kinds without such a method are left out."""
    made = {}
    for kind in kinds:
        # Some processors return a video's frames as images.
        as_images = kind == "video" and "pixel_values_videos" not in inputs
        if kind in registry.facts(info.family).reference.completed_later:
            continue
        name = f"get_{'image' if as_images else kind}_features"
        # Older versions of transformers name a video's pixels like an image's.
        own = inputs if name != "get_video_features" else {k: v for k, v in inputs.items() if k not in _IMAGE_OUTPUTS}
        for method in (getattr(part, name, None) for part in (getattr(model, "model", None), model)):
            known = () if method is None else inspect.signature(method).parameters
            given = {k: v for k, v in own.items() if k in known or (k == "image_sizes" and "kwargs" in known)}
            if method is None or not given:
                continue
            output = method(**given, return_dict=True)
            # In some families, older versions of transformers leave this empty.
            if output.pooler_output is not None:
                made[kind] = _rows(output, kind)
                break
    return made


def _placed(made: Trace, info: ModelInfo, kind: str, kinds: list[str]) -> Tensor | None:
    """Return the embeddings (E, H) at this kind's placeholders, for models without a method that returns them.

    None if the kind has no placeholders, because the text cross-attends to it, or if another of `kinds` shares them.
    """
    place = info.placeholder_ids.get(kind)
    shared = [info.placeholder_ids.get(each) for each in kinds].count(place) > 1
    if place is None or shared or info.cross is not None or made.embeds_TH is None:
        return None
    rows = made.embeds_TH[torch.tensor(made.prompt_ids) == place]
    return rows if len(rows) else None


def _rows(output: Any, kind: str) -> Tensor:
    """Return a tower's output (E, H) without the padding of shorter audio."""
    pooled, mask = output.pooler_output, getattr(output, "attention_mask", None)
    if kind == "audio" and mask is not None and isinstance(pooled, Tensor) and mask.shape == pooled.shape[:2]:
        return pooled[mask.bool()]
    parts = pooled if isinstance(pooled, list | tuple) else [pooled]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _answer(model: Any, info: ModelInfo, inputs: dict[str, Any], max_tokens: int, made: Trace) -> None:
    """Generate an answer and record the decoder's inputs."""
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
    """Return the decoder's positions as (X, T): from (1, T), (X, 1, T), or (1 + X, 1, T) with plain positions first."""
    if positions.dim() == 2:
        return positions[:1].clone()
    axes = positions[:, 0]
    return axes[1:].clone() if axes.shape[0] == 1 + count else axes.clone()
