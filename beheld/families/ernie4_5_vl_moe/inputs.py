"""ERNIE 4.5 VL: numbered images and videos, whose placeholders prompts also write in another form.

The main branch of baidu's repository has files for code of its own: a sentencepiece tokenizer, and one processor with
the settings of images and videos. They are read here by transformers' classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from beheld.checkpoint.convert import own_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ModelError, ProcessError
from beheld.families.inputs import LAID_OUT, FamilyInputs

_SPELLINGS = {"<|image@placeholder|>": "<|IMAGE_PLACEHOLDER|>", "<|video@placeholder|>": "<|VIDEO_PLACEHOLDER|>"}
# What transformers' processor calls them -> the tokens, in the order in which those that are missing are added.
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
_PROBES = ("What is the 1st of 25 pictures?\nTwo  lines: ", " désert, これは絵です。", "User: a\tb")


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """The text with the placeholders that the repository's own code reads as those that the tokenizer knows."""
    for written, known in _SPELLINGS.items():
        text = text.replace(written, known)
    return text


def frame_rate(part: Any) -> float:
    """The rate at which the processor samples, since frames that come without times were chosen by somebody."""
    return float(part.fps)


def read_tokenizer(folder: Path) -> Any | None:
    """The tokenizer of the main branch's files in `folder`; None if transformers' own loading reads what is there.

    Raises:
        ModelError: a package or a file is missing, or it would not give what sentencepiece itself does.
    """
    said = read_json(folder / "tokenizer_config.json")
    if said.get("tokenizer_class") != "Ernie4_5_VLTokenizer":
        return None
    for package, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf")):
        if find_spec(module) is None:
            raise ModelError(
                f"The tokenizer of ERNIE's main branch needs the package {package}, which is not installed.",
                f"Install it: pip install sentencepiece protobuf. Or: {_REMEDY}",
            )
    if not (folder / "tokenizer.model").is_file():
        raise ModelError("ERNIE's tokenizer has no file tokenizer.model.", _REMEDY)
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken
    from transformers import LlamaTokenizer

    found = LlamaTokenizer.from_pretrained(str(folder), add_bos_token=False, add_prefix_space=False)
    # Pieces of their own in that vocabulary, but ordinary text.
    found.add_tokens([AddedToken(str(digit), normalized=False, special=False) for digit in range(10)])
    _add_marks(found, own_config(read_json(folder / CONFIG)).get("config"))
    own = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for probe in _PROBES:
        if own.encode(probe) != found.encode(probe, add_special_tokens=False):
            raise ModelError(
                "ERNIE's tokenizer.model is of a form that transformers' tokenizer cannot follow.", _REMEDY
            )
    if isinstance(found.chat_template, str):
        found.chat_template = rewrite(found.chat_template, {})
    return found


def _add_marks(tokenizer: Any, config: Any) -> None:
    """Let the tokenizer know the placeholders and their marks by the names that transformers' processor uses."""
    from beheld.inputs.prompt.tokenizer import extended

    extended(tokenizer, tuple(_MARKS.values()))
    for name, mark in _MARKS.items():
        index = tokenizer.convert_tokens_to_ids(mark)
        wanted = getattr(config, f"{name}_id", index)
        if index != wanted:
            raise ModelError(f"ERNIE's tokenizer has {mark} at {index}, the configuration at {wanted}.", _REMEDY)
        setattr(tokenizer, name, mark)
        setattr(tokenizer, f"{name}_id", index)


# Settings of images that the main branch's file has under transformers' names.
_SAME = (
    *("do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "merge_size"),
    *("patch_size", "resample", "rescale_factor"),
)
# Settings of videos: there -> here.
_VIDEO = {"video_fps": "fps", "video_max_frames": "max_frames", "video_min_frames": "min_frames"}
_SIZE = '"size": {"shortest_edge": ..., "longest_edge": ...}'
# The names of options there -> how to say it here.
_NAMED_HERE = {there: f"Write {here}." for there, here in _VIDEO.items()} | {
    "video_target_frames": "Write num_frames.",
    "video_frames_sample": "Leave it out; or choose the frames yourself, and give their places as frames_indices.",
    **{
        f"{kind}_{bound}": f'Write "{kind}s_kwargs": {{{_SIZE}}}, in pixels.'
        for kind in ("image", "video")
        for bound in ("min_pixels", "max_pixels")
    },
    # Qwen2-VL's, which transformers' class takes for ERNIE too, and does not mind.
    **dict.fromkeys(("min_pixels", "max_pixels"), f"Write {_SIZE}, in pixels."),
}
# What transformers' classes cannot do otherwise.
_BUILT = {
    "spatial_conv_size": 2,
    "temporal_conv_size": 2,
    "temporal_patch_size": 2,
    "video_frames_sample": "leading",
    "video_target_frames": -1,
}
# Names of classes, and sizes that the repository's code sets to others or does not read.
_UNREAD = frozenset(
    ("auto_map", "chat_template", "image_processor_type", "feature_extractor_type", "processor_class", "size")
)


def load(path: Path) -> Any:
    """The processor of a checkpoint; without the font, it has none, which images do not need.

    Raises:
        ModelError: a setting means something that transformers' classes do not do.
    """
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, Ernie4_5_VLMoeProcessor

    said = read_json(path / "preprocessor_config.json")
    if said.get("image_processor_type") == "Ernie4_5_VLImageProcessor":
        tokenizer = read_tokenizer(path) or AutoTokenizer.from_pretrained(str(path))
        said = said | read_json(path / "processor_config.json")
        return Ernie4_5_VLMoeProcessor(_pictures(said), tokenizer, _videos(said, path))
    video = read_json(path / "processor_config.json").get("video_processor")
    video = dict(video or read_json(path / "video_preprocessor_config.json"))
    if (path / str(video.get("font"))).is_file() or not video.get("draw_on_frames"):
        return AutoProcessor.from_pretrained(str(path))
    from transformers import Ernie4_5_VLMoeVideoProcessor

    tokenizer = AutoTokenizer.from_pretrained(str(path))
    videos = Ernie4_5_VLMoeVideoProcessor(**video | {"font": None})
    return Ernie4_5_VLMoeProcessor(AutoImageProcessor.from_pretrained(str(path)), tokenizer, videos)


def _pictures(said: Mapping[str, Any]) -> Any:
    """transformers' processor of images with the main branch's settings."""
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
    for name, value in said.items():
        if name not in known or value != _BUILT.get(name, value):
            raise ModelError(f"ERNIE's setting {name} {value!r} of pictures and videos is not built.", _REMEDY)
    size = {
        "shortest_edge": said.get("min_pixels") or 56 * 56,
        "longest_edge": said.get("max_pixels") or 6177 * 28 * 28,
    }
    # Counted by the one, sized by the other: that code itself goes wrong where they differ.
    for name, edge in (("image_min_pixels", "shortest_edge"), ("image_max_pixels", "longest_edge")):
        if said.get(name, size[edge]) != size[edge]:
            raise ModelError(f"ERNIE's setting {name} {said[name]} is not that of its pictures, {size[edge]}.", _REMEDY)
    return Ernie4_5_VLMoeImageProcessor(size=size, **{name: said[name] for name in _SAME if name in said})


def _videos(said: Mapping[str, Any], path: Path) -> Any:
    """transformers' processor of videos, with its own settings where the main branch has none."""
    from transformers import Ernie4_5_VLMoeVideoProcessor

    size = {
        "shortest_edge": said.get("video_min_pixels") or 299 * 28 * 28,
        "longest_edge": said.get("video_max_pixels") or 1196 * 28 * 28,
    }
    own: dict[str, Any] = {name: said[name] for name in _SAME if name in said}
    own |= {here: said[there] for there, here in _VIDEO.items() if there in said}
    font = path / _FONT
    defaults: dict[str, Any] = {"fps": 2, "size": size, "font": str(font) if font.is_file() else None}
    return Ernie4_5_VLMoeVideoProcessor(**(defaults | own))


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """One item, as the processor itself makes it.

    Raises:
        ProcessError: times are to be drawn, and the font is not there.
    """
    if modality == "image":
        outputs, texts = processor._process_images([item], **options)
        return outputs, texts[0]
    draws = options.get("draw_on_frames")
    draws = processor.video_processor.draw_on_frames if draws is None else draws
    if draws and processor.video_processor.font is None:
        raise ProcessError(
            f"Times are drawn on a video's frames, and the checkpoint's folder has no font {_FONT}.",
            f"Put {_FONT} there; or draw none: mm_processor_kwargs={{'draw_on_frames': False}}.",
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
