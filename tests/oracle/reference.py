"""transformers' own answers: one request at a time through its processor and its generate(), in float32."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    LlavaProcessor,
)

from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.families import registry
from beheld.models.load import converted_weights
from beheld.tools.verify.reference import fill_outputs
from tests import tiny
from tests.long import LONG
from tests.oracle.cases import Ask

SOFTCAPPED = ("gemma2", "paligemma2")
"""Families whose attention scores are capped: transformers does that in its eager attention alone. Phi-4's tower looks
both ways there alone, too: see families/phi4_multimodal/model.py."""

SUNK = ("gpt_oss",)
"""Families whose heads have sinks: so has transformers' eager attention alone."""

# Models that are kept. Those of all families are gigabytes, which each full collection of a long run walks through.
_FAMILIES = 4


@dataclass(frozen=True)
class Answer:
    """What transformers says.

    Attributes:
        prompt_ids: the prompt with every placeholder replaced.
        token_ids: the greedy answer, end-of-sequence ids ignored.
        logprobs: of each of its tokens.
        gaps: at each step, by how much the chosen logit exceeds the next, of those that may be chosen.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]


@lru_cache(_FAMILIES)
def model(family: str) -> Any:
    """The family's tiny model as `load_model` makes it."""
    return load_model(family, tiny.plain(family))


def load_model(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in `folder` in `dtype`, set to greedy decoding and to ignoring every end-of-sequence id."""
    package = _defined_here(folder)
    if package:
        own = registry.own_class(package, "model").from_pretrained(**sources(folder), dtype=dtype).eval()
        own.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        return own
    kind = AutoModelForMultimodalLM if family in tiny.MEDIA_FAMILIES else AutoModelForCausalLM
    if family in tiny.APART:
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = getattr(transformers, stated["architectures"][0])
    if family in tiny.ADAPTED_FAMILIES:
        kind = transformers.Phi4MultimodalForCausalLM
    if family in tiny.THINKERS:
        kind = getattr(transformers, tiny.THINKERS[family])
    # Gemma 4's tower for sound and GOT-OCR's for pictures take no fused attention: transformers chooses for each part.
    chooses = family in ("gemma4", "got_ocr2")
    eager = family in (*SOFTCAPPED, *SUNK, *tiny.ADAPTED_FAMILIES)
    attention = "eager" if eager else None if chooses else "sdpa"
    loaded = kind.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
    # The checkpoint's own defaults (sampling, a repetition penalty) would otherwise fill what a call leaves open.
    if loaded.config.is_encoder_decoder:
        # What such a checkpoint does to every answer is part of the answer.
        own = GenerationConfig.from_pretrained(folder)
        own.update(num_beams=1, early_stopping=False, eos_token_id=None)
        loaded.generation_config = own
        return loaded
    fill_outputs(loaded, registry.facts(_package(folder)).reference.asks_of_text)
    for part in (loaded, getattr(loaded, "language_model", None)):
        if hasattr(part, "generation_config"):
            part.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return loaded


def sources(folder: Path) -> dict[str, Any]:
    """What `from_pretrained` of the class that runs the model in `folder` takes: a folder, or weights of several."""
    if not _defined_here(folder):
        return {"pretrained_model_name_or_path": folder}
    args = EngineArgs(model=str(folder))
    # The ids of placeholders may stand in the tokenizer's files alone.
    config = read_config(folder, args)
    config, weights, _ = converted_weights(config, read_info(folder, args, config))
    source = folder if weights is None else None
    return {"pretrained_model_name_or_path": source, "state_dict": weights, "config": config}


def _package(folder: Path) -> str:
    """The family's package; "" if it has no folder."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return registry.find(content.get("model_type"), content.get("architectures", ()))


def _defined_here(folder: Path) -> str:
    """The family's package, if it has classes of its own; else "". Such a model's answers are also compared with
    those of another implementation: see tests/reference."""
    package = _package(folder)
    return package if registry.facts(package).definition is not None else ""


@cache
def processor(family: str) -> Any:
    """The tiny checkpoint's processor, as `load_processor` makes it."""
    return load_processor(family, tiny.checkpoint(family))


def load_processor(family: str, folder: Path) -> Any:
    """The processor in `folder`, or the tokenizer of a family that takes text alone."""
    load = registry.inputs(_package(folder)).load
    if load is not None and family in (*tiny.MEDIA_FAMILIES, *tiny.APART) and _defined_here(folder):
        return load(folder)
    read = registry.inputs(_package(folder)).read_tokenizer
    if read is not None and family in tiny.TEXT_FAMILIES:
        return read(folder)
    kind = AutoProcessor if family in (*tiny.MEDIA_FAMILIES, *tiny.APART) else AutoTokenizer
    if family == "mantis":
        # transformers has none of that name; what the checkpoint's own does to a prompt stands in `prompt`.
        return LlavaProcessor.from_pretrained(folder, patch_size=14, vision_feature_select_strategy="default")
    return kind.from_pretrained(folder)


def prompt(family: str, ask: Ask) -> str:
    """The prompt as transformers' processor is given it."""
    text = ask.prompt(family)
    if family == "mantis":
        for number in range(1, 1 + len(ask.images)):
            text = text.replace("<image>", f"(image {number}: <Image><IMAGE></Image>)", 1)
        text = text.replace("<IMAGE>", "<image>")
    return text


def inputs(family: str, ask: Ask) -> dict[str, Any]:
    """The tensors of the whole prompt, as the processor makes them in one call."""
    if family == "voxtral":
        return _voxtral_inputs(ask)
    media: dict[str, Any] = {}
    if ask.images:
        # One inner list to a prompt, as apply_chat_template has it: OneVision cuts a picture only if it is alone there.
        media["images"] = ask.pictures() if family in tiny.LISTED_FAMILIES else [ask.pictures()]
    if ask.videos:
        clips = [clip.array for clip in ask.videos]
        # SmolVLM's, before 5.23, counts what lies in the list of a prompt.
        media["videos"] = [clips] if family == "smolvlm" else clips
        known = [clip.metadata for clip in ask.videos]
        if all(entry is not None for entry in known):
            # Frames whose places are known were chosen already; some processors would choose among them again.
            media |= {"video_metadata": known, "do_sample_frames": False}
            if family in tiny.THINKERS:
                # Without a word of it this processor takes two frames a second, whatever the metadata say.
                media["fps"] = ask.videos[0].fps
    if ask.sounds:
        media |= {"audio": ask.waves(), "audio_kwargs": {"sampling_rate": tiny.SOUND_RATE}}
    if family in tiny.LISTED_FAMILIES and not ask.images:
        return dict(processor(family).tokenizer([prompt(family, ask)], return_tensors="pt"))
    made = processor(family)(text=[prompt(family, ask)], return_tensors="pt", **media)
    # Llama 4's processor gives bfloat16; transformers leaves it to the caller to make it the model's type.
    return dict(made.to(torch.float32))


def _voxtral_inputs(ask: Ask) -> dict[str, Any]:
    """Voxtral's processor joins text and sound by means of another library; here they are joined by hand."""
    parts, ears = processor("voxtral"), model("voxtral").config.audio_config
    features = [
        parts._retrieve_input_features(
            [wave], 3000, sampling_rate=tiny.SOUND_RATE, padding=True, truncation=False, pad_to_multiple_of=480000,
            return_tensors="pt",
        )
        for wave in ask.waves()
    ]  # fmt: skip
    embeds = ears.max_source_positions * ears.hidden_size // ears.intermediate_size
    prompt = ask.prompt("voxtral")
    pieces = prompt.split(parts.audio_token)
    text = pieces[0] + "".join(
        parts.audio_token * (embeds * len(made)) + piece for made, piece in zip(features, pieces[1:], strict=True)
    )
    made = {"input_ids": parts.tokenizer(text, return_tensors="pt")["input_ids"]}
    return made | ({"input_features": torch.cat(features)} if features else {})


def sound_token(family: str) -> int:
    """The id that stands for one embedding of a sound."""
    config = model(family).config
    return int(getattr(config, "audio_token_id", None) or config.audio_config.audio_token_id)


def answer(family: str, ask: Ask) -> Answer:
    """What transformers answers to `ask`; kept, so that every engine is compared with the same run."""
    # Embeddings are those of the very pictures: the answer must not depend on the way in.
    return _answer(family, replace(ask, as_embeds=False))


@cache
def _answer(family: str, ask: Ask) -> Answer:
    kept = _place(family, ask)
    if kept is None:
        return _computed(family, ask)
    if not kept.is_file():
        draft = kept.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(asdict(_computed(family, ask))), encoding="utf-8")
        draft.replace(kept)
    told = json.loads(kept.read_text(encoding="utf-8"))
    return Answer(**{name: tuple(values) for name, values in told.items()})


def _place(family: str, ask: Ask) -> Path | None:
    """Where an answer is kept between runs, beside the checkpoint that gave it; None if it is computed each time.

    So are all in the long form, and those that code of ours takes part in: they change with what is tested.
    """
    folder = tiny.checkpoint(family)
    ours = _defined_here(folder) or (family in tiny.JOINED_FAMILIES and ask.images and ask.videos)
    if LONG or ours:
        return None
    answers = folder.with_name(f"{family}.answers")
    answers.mkdir(exist_ok=True)
    key = hashlib.sha256(f"{_origin()} {ask!r}".encode()).hexdigest()
    return answers / f"{key[:32]}.json"


@cache
def _origin() -> str:
    """What an answer depends on besides its question and what the checkpoint's folder is named after."""
    names = {"numpy", "peft", "pillow", "timm", "tokenizers", "torchaudio", "torchvision"}
    libraries = sorted({f"{d.name} {d.version}" for d in metadata.distributions() if d.name.lower() in names})
    sources = [path for path in sorted(Path(__file__).parent.glob("*.py")) if not path.name.startswith("test_")]
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return f"{content} {libraries} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"


def _computed(family: str, ask: Ask) -> Answer:
    # BLIP-2's own generate wants a picture; without one, its language model answers alone.
    speaker = model(family).language_model if family == "blip2" and not ask.images else model(family)
    if family in tiny.ADAPTED_FAMILIES:
        speaker = adapted(family, "vision" if ask.images else "speech") if ask.images or ask.sounds else speaker
    if family in tiny.JOINED_FAMILIES and ask.images and ask.videos:
        from tests.oracle import joined

        return answered(speaker, joined.inputs(family, ask), ask.max_tokens)
    return answered(speaker, inputs(family, ask), ask.max_tokens)


@lru_cache(_FAMILIES)
def adapted(family: str, kind: str) -> Any:
    """Another copy of the model, with the adapter that the checkpoint brings for this kind of media."""
    made = copy.deepcopy(model(family))
    made.load_adapter(str(tiny.checkpoint(family) / f"{kind}-lora"), adapter_name=kind)
    return made.eval()


def image_token(family: str) -> int:
    """The id that stands for one embedding of a picture."""
    config = model(family).config
    # It may be 0.
    known = getattr(config, "image_token_id", None)
    return int(config.vision_config.image_token_id if known is None else known)


def answered(speaker: Any, prepared: dict[str, Any], max_tokens: int) -> Answer:
    """What a model's own generate() says."""
    with torch.inference_mode():
        made = speaker.generate(
            **prepared,
            max_new_tokens=max_tokens,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
    prompt = tuple(prepared["input_ids"][0].tolist())
    if speaker.config.is_encoder_decoder:
        # The encoder reads the prompt; the decoder begins with the token that starts every answer.
        prompt = tuple(made.sequences[0].tolist()[:1])
    tokens = tuple(made.sequences[0].tolist()[len(prompt) :])
    logits = torch.stack([step[0] for step in made.logits]).double()
    best = torch.stack([step[0] for step in made.scores]).topk(2, dim=-1).values
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return Answer(prompt, tokens, tuple(logprobs.tolist()), tuple((best[:, 0] - best[:, 1]).tolist()))


@cache
def image_embeds(family: str, ask: Ask) -> Any:
    """The pictures of `ask` as the public API takes embeddings.

    LLaVA: a tensor (pictures, embeddings, hidden). Qwen2-VL: image_embeds (embeddings of all, hidden), image_grid_thw.
    """
    prepared = inputs(family, ask)
    with torch.inference_mode():
        if family == "llava":
            features = model(family).get_image_features(prepared["pixel_values"], return_dict=True).pooler_output
            return torch.stack(list(features)).clone()
        grid = prepared["image_grid_thw"]
        features = model(family).get_image_features(prepared["pixel_values"], grid, return_dict=True).pooler_output
        return {"image_embeds": torch.cat(list(features)).clone(), "image_grid_thw": grid}


def chat_ids(family: str, media: list[dict[str, Any]], text: str) -> tuple[int, ...]:
    """The ids that transformers makes of a user's turn with media (as parts of a message) before a text, replaced."""
    vision = family in tiny.MEDIA_FAMILIES
    parts = [*media, {"type": "text", "text": text}]
    made = processor(family).apply_chat_template(
        [{"role": "user", "content": parts if vision else text}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    return tuple(made["input_ids"][0].tolist())
