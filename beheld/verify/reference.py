"""The side of transformers: its processor, its model, its generate().

Shapes: T tokens, X position axes.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from beheld.core.errors import ModelError
from beheld.verify.trace import Question, Trace


def trace(path: str, question: Question, *, dtype: str, trust_remote_code: bool) -> Trace:
    """Record what transformers makes of the question, with the checkpoint in the folder `path`, on the CPU.

    Raises:
        ModelError: transformers cannot run it.
    """
    try:
        return _trace(path, question, dtype, trust_remote_code)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        text = str(error).strip().splitlines()
        raise ModelError(f"transformers cannot answer: {text[0] if text else type(error).__name__}") from error


def _trace(path: str, question: Question, dtype: str, trust_remote_code: bool) -> Trace:
    import transformers

    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    plain = config.get_text_config(decoder=True) is config
    kind = transformers.AutoModelForCausalLM if plain else transformers.AutoModelForMultimodalLM
    wanted = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    # Soft caps are computed by transformers' eager attention alone.
    capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    model: Any = kind.from_pretrained(path, attn_implementation="eager" if capped else "sdpa", **wanted).eval()
    # The checkpoint's own defaults (sampling, penalties) must not take part.
    parts: list[Any] = [model, getattr(model, "language_model", None)]
    for part in parts:
        if hasattr(part, "generation_config"):
            part.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    made = Trace()
    inputs = _inputs(path, question, made, plain=plain)
    inputs = {k: v.to(model.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    made.prompt_ids = tuple(inputs["input_ids"][0].tolist())
    made.features = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.shape[0] and _is_feature(k)}
    with torch.inference_mode():
        made.encoded_EH = _encoded(model, inputs)
        _answer(model, inputs, question.max_tokens, made)
    return made


def _is_feature(name: str) -> bool:
    return not name.startswith(("input_ids", "attention_mask", "token_type", "mm_token_type", "position_ids"))


def pictures(question: Question) -> list[Any]:
    """The question's pictures as transformers is given them: upright, RGB."""
    from PIL import Image, ImageOps

    opened = [image if isinstance(image, Image.Image) else Image.open(image) for image in question.images]
    return [ImageOps.exif_transpose(image).convert("RGB") for image in opened]


def _inputs(path: str, question: Question, made: Trace, *, plain: bool) -> dict[str, Any]:
    """The model's inputs, by the processor in one call; what it renders goes into `made`."""
    import transformers

    kind: Any = transformers.AutoTokenizer if plain else transformers.AutoProcessor
    parts = kind.from_pretrained(path)
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
    return dict(parts(text=[text], return_tensors="pt", **media, **ends))


def _encoded(model: Any, inputs: dict[str, Any]) -> Tensor | None:
    """What the model's own method makes of the pictures; None if it has no such method."""
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


def _answer(model: Any, inputs: dict[str, Any], max_tokens: int, made: Trace) -> None:
    """Generate, and watch what enters the decoder."""
    embed = model.get_input_embeddings()

    def enters(decoder: Any, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        embeds = keywords.get("inputs_embeds")
        if embeds is None and keywords.get("input_ids") is not None:
            embeds = embed(keywords["input_ids"])
        if embeds is not None and made.embeds_TH is None:
            made.embeds_TH = embeds[0].clone()
        positions = keywords.get("position_ids")
        if positions is not None:
            made.positions.append(_axes(positions))

    hook = model.get_decoder().register_forward_pre_hook(enters, with_kwargs=True)
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
        hook.remove()
    made.logits = [logits[0].float() for logits in out.logits]
    made.token_ids = out.sequences[0, len(made.prompt_ids) :].tolist()


def _axes(positions: Tensor) -> Tensor:
    """(X, T) of what a decoder was given: (1, T), (X, 1, T), or (1 + X, 1, T) with plain positions first."""
    if positions.dim() == 2:
        return positions[:1].clone()
    axes = positions[:, 0]
    return axes[1:].clone() if axes.shape[0] in (4,) else axes.clone()
