"""Builds questions from a user's files and text; makes up what the user leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beheld.checkpoint.info import read_info
from beheld.checkpoint.resolve import resolve
from beheld.core.config import EngineArgs, MediaLimits, ModelInfo
from beheld.core.errors import PromptError, TemplateError
from beheld.core.media import MODALITIES, MediaRef
from beheld.families import registry
from beheld.inputs.media import audio, video
from beheld.inputs.prompt.template import ChatTemplates
from beheld.inputs.prompt.tokenizer import load_tokenizer
from beheld.tools.verify.trace import Question

_QUESTIONS = {
    "image": "What is in this image?",
    "video": "What happens in this video?",
    "audio": "What do you hear?",
}
_TEXT_QUESTION = "What is the capital of France?"
_RATE = 16000


def question_of(
    args: EngineArgs, media: Sequence[MediaRef], *, text: str | None, prompt: str | None, max_tokens: int
) -> Question:
    """Return the question for the model of `args`.

    Args:
        args: selects the model.
        media: images, videos and audio, as files.
        text: a question; None for a default that suits the media.
        prompt: a whole prompt with placeholders for `media`, instead of a question.
        max_tokens: of the answer.

    Raises:
        UserError: the model does not accept such media, or a file cannot be read.
    """
    info = read_info(resolve(args), args)
    for ref in media:
        if ref.modality not in info.modalities:
            takes = " and ".join(info.modalities) or "text input only"
            raise PromptError(f"The model {info.name!r} does not accept {ref.modality}; it takes {takes}.")
    items = {kind: [_opened(ref, args) for ref in media if ref.modality == kind] for kind in MODALITIES}
    kinds = [kind for kind, found in items.items() if found]

    def question(asked: str, templated: str) -> Question:
        return Question(asked, items["image"], templated, max_tokens, items["video"], items["audio"], _files(media))

    if prompt is not None:
        return question(prompt, "plain")
    asked = text or (_QUESTIONS[kinds[0]] if kinds else _TEXT_QUESTION)
    tokenizer = load_tokenizer(info, args)
    if _takes_parts(info, args, tokenizer, bool(kinds)):
        return question(asked, "chat")
    places = [(kind, number) for kind in kinds for number in range(1, 1 + len(items[kind]))]
    written = "".join(_placeholder(kind, number, info, tokenizer) for kind, number in places)
    return question(written + asked, "plain")


def _takes_parts(info: ModelInfo, args: EngineArgs, tokenizer: Any, with_media: bool) -> bool:
    """Return whether a chat template exists and places media; without one, no rule says where they belong in a text."""
    family = registry.inputs_of(info.family, Path(info.path))
    templates = ChatTemplates(tokenizer, Path(info.path), family.template_text, only=family.only_template)
    try:
        template = templates.resolve(None, None)
    except TemplateError:
        return False
    return not with_media or templates.takes_list(template, args.chat_template_content_format)


def made_up_of(args: EngineArgs) -> list[MediaRef]:
    """Return one generated item of the first kind that the model of `args` accepts; none for a text-only model."""
    taken = read_info(resolve(args), args).modalities
    kind = next((kind for kind in MODALITIES if kind in taken), None)
    if kind is None:
        return []
    return [MediaRef(kind, {"image": lambda: made_up(1)[0], "video": _clip, "audio": _audio}[kind]())]


def made_up(count: int) -> list[Any]:
    """Return images of coloured noise with a shape in them, the same in every run; all differ."""
    import numpy as np
    from PIL import Image, ImageDraw

    made = []
    for index in range(count):
        noise = np.random.default_rng(index).integers(0, 256, (24, 32, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((160, 120), Image.Resampling.BILINEAR)
        ImageDraw.Draw(image).ellipse((20 + 30 * index, 20, 90 + 30 * index, 90), fill=(220, 40, 40))
        made.append(image)
    return made


def _clip() -> tuple[Any, dict[str, Any]]:
    """Return eight frames, two per second, in which the shape crosses the image."""
    import numpy as np

    frames = np.stack([np.roll(np.asarray(made_up(1)[0]), 12 * index, axis=1) for index in range(8)])
    return frames, _metadata(8, 2.0, range(8))


def _audio() -> tuple[Any, int]:
    """Return one second of two tones."""
    import numpy as np

    time = np.arange(_RATE) / _RATE
    return (0.3 * np.sin(880 * time) + 0.2 * np.sin(5000 * time * time)).astype(np.float32), _RATE


def _opened(ref: MediaRef, args: EngineArgs) -> Any:
    """Return an image's file unchanged; other files as the frames or samples that beheld reads from them."""
    if not isinstance(ref.source, Path) or ref.modality == "image":
        return ref.source
    data = ref.source.read_bytes()
    if ref.modality == "audio":
        wave = audio.open_bytes(data, MediaLimits())
        return wave.samples, wave.rate
    options = (args.media_io_kwargs or {}).get("video", {})
    clip = video.open_bytes(data, video.FrameSampling.of(options), MediaLimits())
    return clip.frames, _metadata(clip.total, clip.fps, clip.indices or ()) if clip.fps else {}


def _metadata(total: int, fps: float, indices: Sequence[int]) -> dict[str, Any]:
    return {"total_num_frames": total, "fps": fps, "duration": total / fps, "frames_indices": list(indices)}


def _placeholder(kind: str, number: int, info: ModelInfo, tokenizer: Any) -> str:
    """Return the placeholder of an item in a prompt of this family; empty if the family puts it before every prompt.

    `number` counts items of its kind, from 1.
    """
    family = registry.inputs_of(info.family, Path(info.path))
    if kind in family.most and family.rewrite is not None:
        return ""
    found: str = family.placeholder(kind, number) or tokenizer.convert_ids_to_tokens(info.placeholder_ids[kind])
    return found


def _files(media: Sequence[MediaRef]) -> dict[str, list[Path | None]]:
    """Return the value of Question.files."""
    files: dict[str, list[Path | None]] = {}
    for ref in media:
        if ref.modality != "image":
            files.setdefault(ref.modality, []).append(ref.source if isinstance(ref.source, Path) else None)
    return {kind: paths for kind, paths in files.items() if any(paths)}
