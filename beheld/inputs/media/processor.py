"""Runs the checkpoint's processor on one item at a time: content in, MediaItem out."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.checkpoint.remote_code import own_first
from beheld.core.config import EngineArgs, ModelInfo
from beheld.core.errors import BeheldError, DecodeError, ModelError, ParamsError, ProcessError, first_line
from beheld.core.media import AUDIO_PLACES, MediaItem
from beheld.families.inputs import ByCount, BySizes, FamilyInputs, ProcessedItem
from beheld.inputs.media import effective_size, frames, soundtracks
from beheld.inputs.media import processor_options as options_of
from beheld.inputs.media.cache import Processed
from beheld.inputs.media.digest import Digest
from beheld.inputs.media.frames import Shown
from beheld.inputs.media.receipt import used_audio, used_image, used_video
from beheld.inputs.media.video import Clip
from beheld.inputs.prompt.tokenizer import PromptTokenizer

_PARTS = ("image_processor", "video_processor", "audio_processor", "feature_extractor")
_SETTINGS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "config.json")

# Exceptions from content that a processor cannot handle; others are bugs, its or ours.
_REFUSALS = (ValueError, ArithmeticError, IndexError, RuntimeError, MemoryError)
# Exceptions that may also come from options of the right type with unsuitable values.
_CONFUSIONS = (TypeError, AttributeError, LookupError)
# The number of option sets whose arguments are cached; callers with new options every time gain nothing.
_MOST_KNOWN = 64


@dataclass(frozen=True, eq=False)
class ProcessorInput:
    """A processing job: decoded content, its digest as an item, options in the processor's terms, setting."""

    modality: str
    content: Any
    digest: bytes
    options: Mapping[str, Any]
    setting: str


class ItemProcessor:
    """Runs the processor that transformers loads for this checkpoint.

    It is loaded with the first item, so that text-only engines do not pay for it. Safe to use from several threads.
    Floating-point features are returned in `feature_dtype`, the towers' type. `loaded` is a processor that another
    instance loaded for the same checkpoint.
    """

    def __init__(
        self,
        info: ModelInfo,
        args: EngineArgs,
        family: FamilyInputs,
        tokenizer: PromptTokenizer,
        feature_dtype: str,
        loaded: Any = None,
    ) -> None:
        self._feature_dtype = feature_dtype
        self._info = info
        self._args = args
        self._family = family
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._loaded: Any = loaded
        self._identity: bytes | None = None
        self._own_tokenizer: PromptTokenizer | None = None
        self._known_arguments: dict[tuple[str, str], dict[str, Any]] = {}

    # ------------------------------------------------------------------ properties

    def identity(self) -> bytes:
        """Return the digest of the processor's settings and of the library that applies them."""
        if self._identity is None:
            from transformers import __version__

            key = Digest("processor").add(__version__).add(self._info.model_type).add(self._args.trust_remote_code)
            for name in _SETTINGS:
                path = Path(self._info.path) / name
                key.add(name).add(path.read_bytes() if path.is_file() else None)
            self._identity = key.done()
        return self._identity

    def loaded(self) -> Any:
        """Return transformers' processor object.

        Raises:
            ModelError: the checkpoint has no processor, or it cannot be loaded.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _load(self) -> Any:
        from transformers import AutoProcessor

        try:
            if self._family.load is not None:
                found = self._family.load(Path(self._info.path))
            else:
                found = own_first(
                    lambda trust: AutoProcessor.from_pretrained(self._info.path, trust_remote_code=trust),
                    trusted=self._args.trust_remote_code,
                )
        except ModelError:
            raise
        except ImportError as error:
            raise ModelError(
                f"The processor of {self._info.name!r} cannot be loaded.",
                "Install the package that it needs.",
                detail=first_line(error),
            ) from error
        except Exception as error:
            raise ModelError(
                f"The processor of {self._info.name!r} cannot be loaded.",
                "Check preprocessor_config.json, and whether torchvision is installed.",
                detail=first_line(error),
            ) from error
        if not any(hasattr(found, part) for part in _PARTS):
            raise ModelError(f"{self._info.name!r} has no processor for media.", "Fetch its preprocessor_config.json.")
        return found

    def options(self, modality: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return one call's options, checked and in the processor's terms.

        Raises:
            ParamsError: one of them is unknown, has a value that transformers does not accept or that is meaningless,
                or is not supported.
        """
        for name, remedy in self._family.unbuilt.items():
            if any(values.get(name) for values in options_of.groups(given)):
                raise ParamsError(f"The option {name!r} is not supported yet.", remedy, param="mm_processor_kwargs")
        for name, remedy in self._family.named_here.items():
            if any(name in values for values in options_of.groups(given)):
                reason = f"The option {name!r} of the repository's code has another name here."
                raise ParamsError(reason, remedy, param="mm_processor_kwargs")
        given = {name: value for name, value in given.items() if name not in self._family.unbuilt}
        if self._family.interleave is not None:
            given, _ = soundtracks.split(given)
        own = options_of.of_modality(self.loaded(), modality, given)
        self._arguments(self.loaded(), modality, own)
        if modality == "video":
            frames.check(own)
        return own

    def max_frames(self) -> int | None:
        """Return the checkpoint's largest number of video frames, if it sets one; does not load the processor."""
        folder = Path(self._info.path)
        own = read_json(folder / "video_preprocessor_config.json")
        nested = read_json(folder / "processor_config.json").get("video_processor")
        value = (nested if isinstance(nested, Mapping) else own).get("max_frames")
        return value if isinstance(value, int) and value > 0 else None

    def rate(self) -> int:
        """Return the audio processor's sampling rate."""
        return int(options_of.part_of(self.loaded(), "audio").sampling_rate)

    # ------------------------------------------------------------------ processing

    def process(self, job: ProcessorInput) -> Processed:
        """Make the item.

        Raises:
            ProcessError: the processor refuses the content.
            MemoryError: there is not enough memory.
        """
        processor = self.loaded()
        try:
            shown = self._shown(processor, job)
            outputs, text = self._call(processor, job, shown)
            lead, ids, tail = self._replacement(processor, text)
        except BeheldError:
            raise
        except _REFUSALS as error:
            if _out_of_memory(error):
                raise MemoryError from error
            if isinstance(error, NotImplementedError):
                raise
            raise ProcessError(
                f"The model's processor refused the {job.modality}.",
                _remedy(job),
                detail=first_line(error),
            ) from error
        except _CONFUSIONS as error:
            if not job.options:
                raise
            raise ProcessError(
                f"The model's processor cannot process the {job.modality} with these options.",
                f"Change or leave out {' and '.join(job.options)}.",
                detail=first_line(error),
            ) from error
        item = replace(self._item(job, outputs, ids), lead=lead, tail=tail)
        return Processed(item, *self._described(job, shown, item, outputs))

    def _shown(self, processor: Any, job: ProcessorInput) -> Shown | None:
        """Return a video as the processor receives it."""
        if not isinstance(job.content, Clip):
            return None
        part = options_of.part_of(processor, "video")
        merge = partial(self._arguments, processor, "video")
        return frames.shown(job.content, job.options, part, merge, self._family.frame_rate)

    def _described(
        self, job: ProcessorInput, shown: Shown | None, item: MediaItem, outputs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Return what the model sees or hears of the item, and what was lost of it."""
        processor = self.loaded()
        part = options_of.part_of(processor, job.modality)
        if job.modality == "audio":
            return used_audio(job.content, item, part)
        look = self._family.looks.get(job.modality)
        if shown is None:
            arguments = self._arguments(processor, job.modality, job.options)
            given = ProcessedItem(job.content.size, outputs, arguments, part, processor)
            return used_image(given, (look or effective_size.of_image)(given))
        count, height, width, _ = job.content.frames.shape
        given = ProcessedItem((width, height), outputs, shown.arguments, part, processor)
        used, lost = used_video(count, shown, given, (look or effective_size.of_video)(given))
        _check_frames(job, shown, used)
        return used, lost

    def _replacement(self, processor: Any, text: str | tuple[int, ...]) -> tuple[str, tuple[int, ...], str]:
        """Return the ids that replace a placeholder, and the ordinary text around them."""
        if not isinstance(text, str):
            return "", text, ""
        tokenizer = self._prompt_tokenizer(processor)
        lead, core, tail = tokenizer.edges(text)
        return lead, tokenizer.replacement(core), tail

    def between(self, item: MediaItem, before: str, after: str) -> MediaItem:
        """Return an item of embeddings only, with the text before and after them.

        Raises:
            DecodeError: embeddings of the text itself are among them, and there are too few for that.
        """
        tokenizer = self._tokenizer if self._tokenizer.inner is not None else self._prompt_tokenizer(self.loaded())
        placeholder = item.replacement_ids[0]
        text = tokenizer.inner.convert_ids_to_tokens(placeholder)
        everywhere, count = item.modality in self._family.embeds_all, item.num_embeds
        if everywhere:
            count -= len(tokenizer.replacement(before + after))
            if count < 1:
                raise DecodeError(
                    f"The embeddings of the {item.modality} are {item.num_embeds}, its beginning and end included.",
                    f"Give all that the model's tower makes of one {item.modality}.",
                )
        made = self._around(item, before + text * count + after, tokenizer)
        assert made.embed_mask is None or sum(made.embed_mask) == item.num_embeds, f"{text!r} is not one token"
        return made

    def sized(
        self, item: MediaItem, form: BySizes, sizes: tuple[tuple[int, int], ...] | None, setting: str
    ) -> MediaItem:
        """Return an item of embeddings only, with the text of an image or of frames of these sizes, width and height.

        Raises:
            DecodeError: there are no sizes, or an item of these has another number of embeddings.
        """
        if sizes is None:
            name, each, shape = "image_sizes", "image, by which its slices are laid out", "(items, 2)"
            if item.modality == "video":
                name, each, shape = "video_image_sizes", "frame of each video", "(items, frames, 2)"
            raise DecodeError(
                f"Embeddings for this model need the size of each {each}.",
                f'Give {{"{item.modality}_embeds": tensor, "{name}": tensor of {shape}, width and height}}.',
            )
        processor = self.loaded()
        made = self._around(item, form.text(processor, sizes, setting), self._prompt_tokenizer(processor))
        count = len(made.replacement_ids) if made.embed_mask is None else sum(made.embed_mask)
        if count != item.num_embeds:
            pixels = f"{sizes[0][0]} x {sizes[0][1]} pixels"
            what = f"An image of {pixels}" if item.modality == "image" else f"A video of {len(sizes)} frames"
            raise DecodeError(
                f"{what} requires {count} embeddings; {item.num_embeds} are given.",
                "Give all that the model's tower makes of it, and the width and height in pixels.",
            )
        return made

    def interleaved(self, video: MediaItem, audio: MediaItem) -> MediaItem:
        """Return a video with its audio as one item."""
        import torch

        assert self._family.interleave is not None
        processor, placeholders = self.loaded(), self._info.placeholder_ids
        text, layout = self._family.interleave(processor, video.layout, audio.num_embeds)
        _, ids, _ = self._replacement(processor, text)
        own = (placeholders["video"], placeholders["audio"])
        heard = [token == own[1] for token in ids if token in own]
        assert (len(heard) - sum(heard), sum(heard)) == (video.num_embeds, audio.num_embeds), "tokens were lost"
        places = torch.tensor([place for place, of_audio in enumerate(heard) if of_audio])
        return replace(
            video,
            digest=Digest("interleaved").add(video.digest).add(audio.digest).done(),
            features={**video.features, **audio.features, AUDIO_PLACES: places},
            layout={**video.layout, **audio.layout, **layout},
            replacement_ids=ids,
            embed_mask=tuple(token in own for token in ids),
            num_embeds=len(heard),
            feature_bytes=video.feature_bytes + audio.feature_bytes + places.nbytes,
        )

    def counted(self, item: MediaItem, form: ByCount) -> MediaItem:
        """Return an item of embeddings only, with the text that follows from their number."""
        processor = self.loaded()
        return self._around(item, form.text(processor, item.num_embeds), self._prompt_tokenizer(processor))

    def _around(self, item: MediaItem, text: str, tokenizer: PromptTokenizer) -> MediaItem:
        """Return an item of embeddings with its text, which has their placeholders."""
        placeholder, everywhere = item.replacement_ids[0], item.modality in self._family.embeds_all
        lead, core, tail = tokenizer.edges(text)
        ids = tokenizer.replacement(core)
        mask = tuple(everywhere or token == placeholder for token in ids)
        return replace(item, replacement_ids=ids, embed_mask=None if all(mask) else mask, lead=lead, tail=tail)

    def _prompt_tokenizer(self, processor: Any) -> PromptTokenizer:
        """Return the engine's tokenizer; the processor's if the engine has none (skip_tokenizer_init)."""
        if self._tokenizer.inner is not None:
            return self._tokenizer
        if self._own_tokenizer is None:
            self._own_tokenizer = PromptTokenizer.of(processor.tokenizer, self._info, self._family)
        return self._own_tokenizer

    def _call(
        self, processor: Any, job: ProcessorInput, shown: Shown | None
    ) -> tuple[Mapping[str, Any], str | tuple[int, ...]]:
        if shown is not None:
            content, arguments = shown.clip.frames, shown.arguments
        else:
            content = job.content.samples if job.modality == "audio" else job.content
            arguments = self._arguments(processor, job.modality, job.options)
        if self._family.call is not None:
            return self._family.call(processor, job.modality, content, arguments, job.setting)
        method = getattr(processor, _METHODS[job.modality], None)
        if method is None or getattr(processor, f"{job.modality}_token", None) is None:
            raise ProcessError(
                f"The processor {type(processor).__name__} does not process one {job.modality} at a time.",
                "This model family is not supported yet.",
            )
        outputs, texts = method([content], **arguments)
        if len(texts) != 1:
            raise ProcessError(f"The processor returned {len(texts)} items for one {job.modality}.")
        return outputs, texts[0]

    def _arguments(self, processor: Any, modality: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return processor_options.arguments, cached per options: checking them takes transformers a millisecond."""
        key = (modality, repr(sorted(options.items())))
        known = self._known_arguments.get(key)
        if known is None:
            known = options_of.arguments(processor, modality, options)
            if len(self._known_arguments) < _MOST_KNOWN:
                self._known_arguments[key] = known
        return copy.deepcopy(known)

    def _item(self, job: ProcessorInput, outputs: Mapping[str, Any], ids: tuple[int, ...]) -> MediaItem:
        import torch

        layout: dict[str, tuple[Any, ...]] = {}
        dropped = frozenset(getattr(self.loaded(), "unused_input_names", ()))
        features: dict[str, Any] = {}
        dtype: torch.dtype = getattr(torch, self._feature_dtype)
        for name, value in outputs.items():
            if name in self._family.layout:
                layout[name] = _numbers(value)
            if name in self._family.host_only or name in dropped:
                continue
            tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            cast = tensor.is_floating_point() and name not in self._family.exact
            features[name] = (tensor.to(dtype) if cast else tensor).contiguous()
        placeholder = self._info.placeholder_ids[self._family.embedded_as.get(job.modality, job.modality)]
        everywhere = job.modality in self._family.embeds_all
        mask = tuple(everywhere or token == placeholder for token in ids)
        count = sum(mask)
        if count == 0:
            remedy = "Use a longer audio file." if job.modality == "audio" else ""
            raise ProcessError(f"The processor returned no placeholder for the {job.modality}.", remedy)
        cross = self._info.cross
        num_states = 0
        if cross is not None and self._info.encoder_reads != "prompt":
            num_states = self._states(outputs, cross.num_states)
            # Cross-attention layers attend to its states; its token is an ordinary one.
            mask, count = (False,) * len(ids), 0
        return MediaItem(
            modality=job.modality,
            digest=job.digest,
            features=features,
            layout=layout,
            replacement_ids=ids,
            embed_mask=None if all(mask) else mask,
            num_embeds=count,
            num_states=num_states,
            feature_bytes=sum(t.numel() * t.element_size() for t in features.values()),
        )

    def _states(self, outputs: Mapping[str, Any], most: int) -> int:
        """Return how many states the encoder makes of an item.

        Raises:
            ProcessError: it makes none, or more than there is room for.
        """
        count = most if self._family.states is None else self._family.states(outputs, Path(self._info.path))
        if not 0 < count <= most:
            wanted = "a shorter" if count > most else "a longer"
            raise ProcessError(
                f"The encoder makes {count} states of it; possible are 1 to {most}.", f"Send {wanted} one."
            )
        return count


_METHODS = {"image": "_process_images", "video": "_process_videos", "audio": "_process_audio"}


def _check_frames(job: ProcessorInput, shown: Shown, used: Mapping[str, Any]) -> None:
    """Check max_frames, which cannot reduce frames that the caller sampled."""
    most = job.options.get("max_frames")
    if most is None or used.get("frames", 0) <= most:
        return
    if shown.chosen:
        # Some rules apply only the checkpoint's limit.
        raise ProcessError(
            f"max_frames is {most}, but the processor sampled {used['frames']} of the video's frames.",
            "Set num_frames or fps instead, or send fewer frames.",
        )
    raise ProcessError(
        f"max_frames is {most}, but {used['frames']} frames were given, which are used as given.",
        'Send fewer, or let the processor sample them with "do_sample_frames": true and max_frames.',
    )


def _remedy(job: ProcessorInput) -> str:
    clip = job.content
    if isinstance(clip, Clip) and clip.indices is None and clip.total > len(clip.frames):
        return f"Set frames_indices to the indices of these {len(clip.frames)} frames among the video's {clip.total}."
    if isinstance(clip, Clip) and len(clip.frames) == 1:
        return "Give more than one frame, or the frame as an image."
    return "Change its size or shape, or the processor's options."


def _numbers(value: Any) -> tuple[Any, ...]:
    """Return the single row of a tensor or list with one entry per item, as plain numbers."""
    rows = value.tolist() if hasattr(value, "tolist") else value
    first = rows[0] if isinstance(rows, list | tuple) else rows
    first = first.tolist() if hasattr(first, "tolist") else first
    return tuple(first) if isinstance(first, list | tuple) else (first,)


def _out_of_memory(error: Exception) -> bool:
    """Return whether an error means that host memory ran out, which torch reports only in words."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
