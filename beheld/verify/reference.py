"""The side of transformers: its processor, its model, its generate().

Where transformers cannot read a checkpoint's layout, its own classes are given what beheld's loader makes of the files;
the trace says so.

Shapes: T tokens, X position axes.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beheld.checkpoint.adapters import built_in
from beheld.checkpoint.info import read_config, read_info
from beheld.checkpoint.resolve import resolve
from beheld.core.config import EngineArgs, ModelInfo
from beheld.core.errors import ModelError
from beheld.inputs.families import family_of
from beheld.inputs.tokens import load_tokenizer
from beheld.models.load import converted_weights, model_class_of
from beheld.verify.trace import Question, Trace

# Families whose method gives what a projector behind the tower then makes embeddings of.
_PROJECTED_LATER = frozenset({"llama4", "molmo2"})
# Families whose decoder is given ids and pictures, and merges them itself.
_MERGED_INSIDE = frozenset({"chameleon", "phi4_multimodal"})
# Families with markers that only the repository's own code reads.
_OTHER_MARKERS = frozenset({"ernie4_5_vl_moe", "phi4_multimodal"})
# Families that transformers computes right with this attention alone; None leaves the choice to it, part by part.
_ATTENTION: dict[str, str | None] = {"gemma4": None, "phi4_multimodal": "eager"}


def trace(args: EngineArgs, question: Question) -> Trace:
    """Record what transformers makes of the question, with the checkpoint of `args`, on the CPU, in `args.dtype`.

    Raises:
        ModelError: transformers cannot run it.
    """
    try:
        return _trace(args, question)
    except (OSError, ValueError, TypeError, AttributeError, ImportError, LookupError, RuntimeError) as error:
        text = str(error).strip().splitlines()
        raise ModelError(f"transformers cannot answer: {text[0] if text else type(error).__name__}") from error


def _trace(args: EngineArgs, question: Question) -> Trace:
    path = resolve(args)
    hf_config = read_config(path, args)
    info = read_info(path, args, hf_config)
    made = Trace()
    model = _model(hf_config, info, args, question, made)
    inputs = _inputs(info, args, question, made)
    inputs = {k: v.to(model.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    made.prompt_ids = tuple(inputs["input_ids"][0].tolist())
    made.features = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.shape[0] and _is_feature(k)}
    if info.is_encoder_decoder:
        # The encoder reads the prompt; the decoder begins with the token that starts every answer.
        made.features["input_ids"] = inputs["input_ids"]
        assert info.decoder_start_id is not None
        made.prompt_ids = (info.decoder_start_id,)
    with torch.inference_mode():
        if not info.is_encoder_decoder:
            made.encoded_EH = _encoded(model, info, inputs)
        _answer(model, info, inputs, question.max_tokens, made)
    return made


def _model(hf_config: Any, info: ModelInfo, args: EngineArgs, question: Question, made: Trace) -> Any:
    """transformers' model, set to greedy answers; what was converted for it goes into `made`."""
    from transformers import GenerationConfig

    hf_config, weights, made.converted = converted_weights(hf_config, info)
    # Soft caps are computed by transformers' eager attention alone.
    capped = getattr(hf_config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    model: Any = model_class_of(info, hf_config).from_pretrained(
        info.path if weights is None else None,
        state_dict=weights,
        config=hf_config,
        attn_implementation="eager" if capped else _ATTENTION.get(info.model_type, "sdpa"),
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
    if question.images:
        for adapter in built_in(info, ("image",)).values():
            model.load_adapter(adapter.request.lora_path, adapter_name=adapter.request.lora_name)
            model.set_adapter(adapter.request.lora_name)
    return model.eval()


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


def _is_feature(name: str) -> bool:
    return not name.startswith(("input_ids", "attention_mask", "token_type", "mm_token_type", "position_ids"))


def pictures(question: Question) -> list[Any]:
    """The question's pictures as transformers is given them: upright, RGB."""
    from PIL import Image, ImageOps

    opened = [image if isinstance(image, Image.Image) else Image.open(image) for image in question.images]
    return [ImageOps.exif_transpose(image).convert("RGB") for image in opened]


def _inputs(info: ModelInfo, args: EngineArgs, question: Question, made: Trace) -> dict[str, Any]:
    """The model's inputs, by the processor in one call; what it renders goes into `made`."""
    parts = _processor(info, args)
    images = pictures(question)
    media = {"images": [images]} if images else {}
    text, ends = question.text, {}
    if question.templated == "chat":
        content = [{"type": "image"} for _ in images] + [{"type": "text", "text": question.text}]
        messages = [{"role": "user", "content": content if images else question.text}]
        text = parts.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # A template writes the ends itself.
        ends = {"add_special_tokens": False}
        made.rendered = text
    tokenizer = getattr(parts, "tokenizer", parts)
    if tokenizer.pad_token is None:
        # Some processors ask for padding also of a lone text.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    text = _with_markers(text, info, len(images), tokenizer)
    return dict(parts(text=[text], return_tensors="pt", **media, **ends))


def _processor(info: ModelInfo, args: EngineArgs) -> Any:
    """The checkpoint's processor, or the tokenizer of a model that takes text alone."""
    from transformers import AutoProcessor

    if not info.modalities:
        return load_tokenizer(info, args)
    load = family_of(info).load
    if load is not None:
        return load(Path(info.path))
    return AutoProcessor.from_pretrained(info.path, trust_remote_code=args.trust_remote_code)


def _with_markers(text: str, info: ModelInfo, count: int, tokenizer: Any) -> str:
    """The text with markers that transformers' processor reads, where the published code reads others."""
    family = family_of(info)
    marks = {modality: tokenizer.convert_ids_to_tokens(index) for modality, index in info.placeholder_ids.items()}
    if "image" in family.numbered:
        first, *rest = text.split(marks["image"])
        marked = [f"(image {number}: <Image>{marks['image']}</Image>){part}" for number, part in enumerate(rest, 1)]
        return first + "".join(marked)
    if info.model_type not in _OTHER_MARKERS or family.rewrite is None:
        return text
    written = family.rewrite(text, {"image": count})
    pieces = (written,) if isinstance(written, str) else written
    return "".join(piece if isinstance(piece, str) else marks[piece.modality] for piece in pieces)


def _encoded(model: Any, info: ModelInfo, inputs: dict[str, Any]) -> Tensor | None:
    """What the model's own method makes of the pictures; None if it has no such method, or gives something before."""
    if info.model_type in _PROJECTED_LATER:
        return None
    method = getattr(model, "get_image_features", None) or getattr(
        getattr(model, "model", None), "get_image_features", None
    )
    if method is None or "pixel_values" not in inputs:
        return None
    known = inspect.signature(method).parameters
    result = method(**{k: v for k, v in inputs.items() if k in known}, return_dict=True)
    pooled = result.pooler_output
    parts = pooled if isinstance(pooled, list | tuple) else [pooled]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _answer(model: Any, info: ModelInfo, inputs: dict[str, Any], max_tokens: int, made: Trace) -> None:
    """Generate, and watch what enters the decoder."""
    embed = model.get_input_embeddings()
    merges = info.model_type in _MERGED_INSIDE

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
