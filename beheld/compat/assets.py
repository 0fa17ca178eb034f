"""The example images, videos and audio that scripts request by name: from a folder, else from the network."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beheld.compat import media
from beheld.core.config import MediaLimits
from beheld.core.errors import FetchError
from beheld.core.value_checks import nearest
from beheld.inputs.fetch.fetch import FetchRules, fetch
from beheld.inputs.media import audio, decode, video
from beheld.utils import env

PUBLIC = "https://vllm-public-assets.s3.us-west-2.amazonaws.com"
VIDEO_DATASET = "raushan-testing-hf/videos-test"
IMAGES: Mapping[str, str] = {
    "cherry_blossom": "vision_model_images/cherry_blossom.jpg",
    "stop_sign": "vision_model_images/stop_sign.jpg",
}
AUDIOS: Mapping[str, str] = {
    "azacinto_foscolo": "multimodal_asset/azacinto_foscolo.ogg",
    "mary_had_lamb": "multimodal_asset/mary_had_lamb.ogg",
    "winning_call": "multimodal_asset/winning_call.ogg",
}
# The video was renamed; both names refer to the same file.
VIDEOS: Mapping[str, str] = {"baby_reading": "sample_demo_1.mp4", "sample_demo_1.mp4": "sample_demo_1.mp4"}
_LIMITS = MediaLimits(image_formats="all")
_RULES = FetchRules(limits=_LIMITS)


@dataclass(frozen=True)
class ImageAsset:
    """An image by name: "cherry_blossom" or "stop_sign"."""

    name: str

    @property
    def pil_image(self) -> Any:
        """The image as a PIL image in its original mode.

        Raises:
            FetchError: the asset is unknown, or its file is neither local nor reachable.
        """
        from PIL import Image

        data = self.get_path().read_bytes()
        # Validated like any other image, but returned unconverted: scripts convert it themselves.
        decode.open_bytes(data, _LIMITS)
        return Image.open(io.BytesIO(data))

    def get_path(self) -> Path:
        """The path of the local file.

        Raises:
            FetchError: see `pil_image`.
        """
        return _local(_named("ImageAsset", self.name, IMAGES), _from_public)


@dataclass(frozen=True)
class VideoAsset:
    """A video by name: "sample_demo_1.mp4" (alias "baby_reading"); the first `num_frames` frames, -1 for all."""

    name: str
    num_frames: int = -1
    fps: float | None = None

    @property
    def video_path(self) -> str:
        """The path of the local file.

        Raises:
            FetchError: the asset is unknown, or its file is neither local nor reachable.
        """
        return str(_local(_named("VideoAsset", self.name, VIDEOS), _from_dataset))

    @property
    def np_ndarrays(self) -> Any:
        """The frames, uint8 (frames, height, width, 3) in RGB."""
        return self._clip().frames

    @property
    def pil_images(self) -> list[Any]:
        """The frames as PIL images."""
        from PIL import Image

        return [Image.fromarray(frame) for frame in self._clip().frames]

    @property
    def metadata(self) -> dict[str, Any]:
        """The timing metadata of the frames; a pair (np_ndarrays, metadata) is an item for `generate`."""
        return media.frames_and_metadata(self._clip())[1]

    def get_audio(self, sampling_rate: float | None = None) -> Any:
        """The video's audio as mono float32 samples, at its native rate or at `sampling_rate` Hz."""
        wave = audio.open_bytes(Path(self.video_path).read_bytes(), _LIMITS)
        return (wave if sampling_rate is None else audio.resampled(wave, int(sampling_rate))).samples

    def _clip(self) -> video.Clip:
        options: dict[str, Any] = {"num_frames": self.num_frames}
        if self.fps is not None:
            options["fps"] = self.fps
        return video.open_bytes(Path(self.video_path).read_bytes(), video.FrameSampling.of(options), _LIMITS)


@dataclass(frozen=True)
class AudioAsset:
    """An audio clip by name: "winning_call", "mary_had_lamb" or "azacinto_foscolo"."""

    name: str

    @property
    def url(self) -> str:
        """The public URL of the clip."""
        return f"{PUBLIC}/{_named('AudioAsset', self.name, AUDIOS)}"

    @property
    def audio_and_sample_rate(self) -> tuple[Any, int]:
        """The samples (mono float32) and their rate in Hz.

        Raises:
            FetchError: the asset is unknown, or its file is neither local nor reachable.
        """
        wave = audio.open_bytes(self.get_local_path().read_bytes(), _LIMITS)
        return wave.samples, wave.rate

    def get_local_path(self) -> Path:
        """The path of the local file.

        Raises:
            FetchError: see `audio_and_sample_rate`.
        """
        return _local(_named("AudioAsset", self.name, AUDIOS), _from_public)


def _named(kind: str, name: str, known: Mapping[str, str]) -> str:
    if name not in known:
        remedy = nearest(name, known) or f"Known: {', '.join(sorted(known))}."
        raise FetchError(f"There is no {kind} {name!r}.", remedy, param="name")
    return known[name]


def _local(file: str, get: Callable[[str], bytes]) -> Path:
    """Return the local copy of an asset, after downloading it into the assets folder if it is missing.

    Raises:
        FetchError: the download failed; the message names the file and the folder to put it in.
    """
    name = file.rpartition("/")[2]
    own = Path(env.ASSETS_CACHE()).expanduser()
    theirs = Path("~/.cache/vllm/assets").expanduser()
    for place in (own / name, *(root / "vllm_public_assets" / name for root in (own, theirs))):
        if place.is_file():
            return place
    try:
        data = get(file)
    except FetchError as error:
        raise FetchError(
            f"The asset {name!r} is not on this machine and could not be fetched: {error.reason}",
            f"Put the file at {own / name} (BEHELD_ASSETS_CACHE names another folder).",
        ) from error
    own.mkdir(parents=True, exist_ok=True)
    # Written to a temporary name first: another process must never see a partial file.
    draft = own / f"{name}.{os.getpid()}"
    draft.write_bytes(data)
    draft.replace(own / name)
    return own / name


def _from_public(file: str) -> bytes:
    modality = "audio" if file in AUDIOS.values() else "image"
    return fetch(f"{PUBLIC}/{file}", modality, _RULES).data


def _from_dataset(file: str) -> bytes:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(VIDEO_DATASET, file, repo_type="dataset")).read_bytes()
    except Exception as error:
        raise FetchError(f"the dataset {VIDEO_DATASET!r} cannot be read ({type(error).__name__}).") from error


def video_to_ndarrays(path: str, num_frames: int = -1) -> Any:
    """The frames of a video file, uint8 (frames, height, width, 3) in RGB; -1 for all.

    Raises:
        MediaError: it is no video.
    """
    return _clip_of(path, num_frames).frames


def video_to_pil_images_list(path: str, num_frames: int = -1) -> list[Any]:
    """The frames of a video file as PIL images.

    Raises:
        MediaError: it is no video.
    """
    from PIL import Image

    return [Image.fromarray(frame) for frame in _clip_of(path, num_frames).frames]


def video_get_metadata(path: str, num_frames: int = -1) -> dict[str, Any]:
    """The timing metadata of these frames of a video file.

    Raises:
        MediaError: it is no video.
    """
    return media.frames_and_metadata(_clip_of(path, num_frames))[1]


def _clip_of(path: str, num_frames: int) -> video.Clip:
    sampling = video.FrameSampling.of({"num_frames": num_frames})
    return video.open_bytes(Path(path).read_bytes(), sampling, _LIMITS)
