"""ERNIE 4.5 VL: numbered images and videos, whose placeholders have two spellings.

The main branch of baidu's repository has files for its custom code: a sentencepiece tokenizer, and one processor
configuration for images and videos. This module loads them with transformers' classes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from beheld.checkpoint.convert import own_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ModelError, ProcessError
from beheld.families.inputs import LAID_OUT, FamilyInputs
from beheld.utils.log import get_logger, once

_log = get_logger(__name__)

_SPELLINGS = {"<|image@placeholder|>": "<|IMAGE_PLACEHOLDER|>", "<|video@placeholder|>": "<|VIDEO_PLACEHOLDER|>"}
# transformers' processor attribute -> the token, in the order in which missing ones are added.
_MARKS = {
    "image_token": "<|IMAGE_PLACEHOLDER|>",
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}
_FONT = "Roboto-Regular.ttf"
_REMEDY = "Take the files in transformers' own layout instead: revision='refs/pr/11'."
_PROBES = ("What is the 1st of 25 images?\nTwo  lines: ", " désert, これは絵です。", "User: a\tb")


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Replace the placeholders of the repository's code by those that the tokenizer knows."""
    for written, known in _SPELLINGS.items():
        text = text.replace(written, known)
    return text


def frame_rate(part: Any) -> float:
    """Return the processor's sampling rate, because frames without times are already sampled."""
    return float(part.fps)


def read_tokenizer(folder: Path) -> Any | None:
    """Load the tokenizer of the main branch's files in `folder`; None if transformers can load the files itself.

    Raises:
        ModelError: a package or a file is missing, or the tokenizer would differ from sentencepiece.
    """
    settings = read_json(folder / "tokenizer_config.json")
    if settings.get("tokenizer_class") != "Ernie4_5_VLTokenizer":
        return None
    for package, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf")):
        if find_spec(module) is None:
            raise ModelError(
                f"The tokenizer of ERNIE's main branch needs the package {package}, which is not installed.",
                f"Install it: pip install sentencepiece protobuf. Or: {_REMEDY}",
            )
    if not (folder / "tokenizer.model").is_file():
        raise ModelError("The file tokenizer.model of ERNIE's tokenizer is missing.", _REMEDY)
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken
    from transformers import LlamaTokenizer

    found = LlamaTokenizer.from_pretrained(str(folder), add_bos_token=False, add_prefix_space=False)
    # Separate pieces in that vocabulary, but ordinary text.
    found.add_tokens([AddedToken(str(digit), normalized=False, special=False) for digit in range(10)])
    _add_marks(found, own_config(read_json(folder / CONFIG)).get("config"))
    own = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for probe in _PROBES:
        if own.encode(probe) != found.encode(probe, add_special_tokens=False):
            raise ModelError("transformers' tokenizer cannot reproduce ERNIE's tokenizer.model.", _REMEDY)
    if isinstance(found.chat_template, str):
        found.chat_template = rewrite(found.chat_template, {})
    return found


def _add_marks(tokenizer: Any, config: Any) -> None:
    """Give the tokenizer the placeholders and their delimiters by the names that transformers' processor uses."""
    from beheld.inputs.prompt.tokenizer import extended

    extended(tokenizer, tuple(_MARKS.values()))
    for name, mark in _MARKS.items():
        index = tokenizer.convert_tokens_to_ids(mark)
        wanted = getattr(config, f"{name}_id", index)
        if index != wanted:
            raise ModelError(
                f"ERNIE's tokenizer gives {mark} the id {index}, but the configuration gives it {wanted}.", _REMEDY
            )
        setattr(tokenizer, name, mark)
        setattr(tokenizer, f"{name}_id", index)


# Image settings that the main branch's file has under transformers' names.
_SAME = (
    *("do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "merge_size"),
    *("patch_size", "resample", "rescale_factor"),
)
# Video settings: the main branch's name -> ours.
_VIDEO = {"video_fps": "fps", "video_max_frames": "max_frames", "video_min_frames": "min_frames"}
_SIZE = '"size": {"shortest_edge": ..., "longest_edge": ...}'
# The main branch's option names -> how to write the option here.
_NAMED_HERE = {there: f"Write {here}." for there, here in _VIDEO.items()} | {
    "video_target_frames": "Write num_frames.",
    "video_frames_sample": "Leave it out; or choose the frames yourself, and give their places as frames_indices.",
    **{
        f"{kind}_{bound}": f'Write "{kind}s_kwargs": {{{_SIZE}}}, in pixels.'
        for kind in ("image", "video")
        for bound in ("min_pixels", "max_pixels")
    },
    # Settings of Qwen2-VL that transformers' class accepts for ERNIE and ignores.
    **dict.fromkeys(("min_pixels", "max_pixels"), f"Write {_SIZE}, in pixels."),
}
# Settings that transformers' classes cannot change.
_BUILT = {
    "spatial_conv_size": 2,
    "temporal_conv_size": 2,
    "temporal_patch_size": 2,
    "video_frames_sample": "leading",
    "video_target_frames": -1,
}
# Class names, and sizes that the repository's code overwrites or ignores.
_UNREAD = frozenset(
    ("auto_map", "chat_template", "image_processor_type", "feature_extractor_type", "processor_class", "size")
)


class _BuiltInFont:
    """Pillow's own outline font, read as a file each time that a frame is drawn.

    The published checkpoint names Roboto but does not hold it; the shapes of the letters differ.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self) -> bytes:
        """Return the whole font file."""
        return self._content


def _built_in_font() -> _BuiltInFont | None:
    """Return Pillow's font; None if Pillow was built without FreeType."""
    from PIL import ImageFont, features

    if not features.check("freetype2"):
        return None
    found = ImageFont.load_default(12)
    assert isinstance(found, ImageFont.FreeTypeFont)
    return _BuiltInFont(found.font_bytes)


def load(path: Path) -> Any:
    """Load the processor of a checkpoint; without a font file, timestamps are drawn with Pillow's font.

    Raises:
        ModelError: a setting means something that transformers' classes do not support.
    """
    processor = _load(path)
    # A call may draw where the settings do not.
    if processor.video_processor.font is None:
        processor.video_processor.font = _built_in_font()
    return processor


def _load(path: Path) -> Any:
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, Ernie4_5_VLMoeProcessor

    settings = read_json(path / "preprocessor_config.json")
    if settings.get("image_processor_type") == "Ernie4_5_VLImageProcessor":
        tokenizer = read_tokenizer(path) or AutoTokenizer.from_pretrained(str(path))
        settings = settings | read_json(path / "processor_config.json")
        return Ernie4_5_VLMoeProcessor(_image_processor(settings), tokenizer, _video_processor(settings, path))
    video = read_json(path / "processor_config.json").get("video_processor")
    video = dict(video or read_json(path / "video_preprocessor_config.json"))
    if (path / str(video.get("font"))).is_file() or not video.get("draw_on_frames"):
        return AutoProcessor.from_pretrained(str(path))
    from transformers import Ernie4_5_VLMoeVideoProcessor

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    videos = Ernie4_5_VLMoeVideoProcessor(**video | {"font": None})
    return Ernie4_5_VLMoeProcessor(AutoImageProcessor.from_pretrained(str(path)), tokenizer, videos)


def _image_processor(settings: Mapping[str, Any]) -> Any:
    """Return transformers' image processor with the main branch's settings."""
    from transformers import Ernie4_5_VLMoeImageProcessor

    limits = (
        "min_pixels",
        "max_pixels",
        "image_min_pixels",
        "image_max_pixels",
        "video_min_pixels",
        "video_max_pixels",
    )
    known = {*_SAME, *_VIDEO, *_BUILT, *_UNREAD, *limits}
    for name, value in settings.items():
        if name not in known or value != _BUILT.get(name, value):
            raise ModelError(f"ERNIE's setting {name} {value!r} of images and videos is not supported.", _REMEDY)
    size = {
        "shortest_edge": settings.get("min_pixels") or 56 * 56,
        "longest_edge": settings.get("max_pixels") or 6177 * 28 * 28,
    }
    # One counts tokens and the other resizes: the repository's code also fails if they differ.
    for name, edge in (("image_min_pixels", "shortest_edge"), ("image_max_pixels", "longest_edge")):
        if settings.get(name, size[edge]) != size[edge]:
            raise ModelError(
                f"ERNIE's setting {name} {settings[name]} differs from that of its images, {size[edge]}.", _REMEDY
            )
    return Ernie4_5_VLMoeImageProcessor(size=size, **{name: settings[name] for name in _SAME if name in settings})


def _video_processor(settings: Mapping[str, Any], path: Path) -> Any:
    """Return transformers' video processor, with its defaults where the main branch has no setting."""
    from transformers import Ernie4_5_VLMoeVideoProcessor

    size = {
        "shortest_edge": settings.get("video_min_pixels") or 299 * 28 * 28,
        "longest_edge": settings.get("video_max_pixels") or 1196 * 28 * 28,
    }
    own: dict[str, Any] = {name: settings[name] for name in _SAME if name in settings}
    own |= {here: settings[there] for there, here in _VIDEO.items() if there in settings}
    font = path / _FONT
    defaults: dict[str, Any] = {"fps": 2, "size": size, "font": str(font) if font.is_file() else None}
    return Ernie4_5_VLMoeVideoProcessor(**(defaults | own))


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Process one item as the processor does.

    Raises:
        ProcessError: timestamps are to be drawn, but there is no font at all.
    """
    if modality == "image":
        outputs, texts = processor._process_images([item], **options)
        return outputs, texts[0]
    draws = options.get("draw_on_frames")
    draws = processor.video_processor.draw_on_frames if draws is None else draws
    font = processor.video_processor.font
    if draws and font is None:
        raise ProcessError(
            f"The processor draws timestamps on video frames, but the checkpoint's folder has no font {_FONT}.",
            f"Add {_FONT} to the folder, or disable timestamps: mm_processor_kwargs={{'draw_on_frames': False}}.",
        )
    if draws and isinstance(font, _BuiltInFont):
        once(
            _log,
            logging.WARNING,
            f"The checkpoint's folder has no font {_FONT}: timestamps on video frames are drawn with Pillow's font. "
            f"Add {_FONT} to the folder to give the model the letters that it was trained on.",
        )
    outputs, texts = processor._process_videos([item], **options)
    return outputs, texts[0]


INPUTS = FamilyInputs(
    placeholders={
        "image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        "video": "<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>",
    },
    rewrite=rewrite,
    call=call,
    load=load,
    read_tokenizer=read_tokenizer,
    embedded={"video": LAID_OUT},
    frame_rate=frame_rate,
    named_here=_NAMED_HERE,
)
