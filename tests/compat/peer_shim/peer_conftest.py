"""What vLLM's server tests import as `tests.conftest`."""

from __future__ import annotations

from peer_plugin import _Pictures as LocalAssetServer
from peer_runners import HfRunner, VllmRunner

from beheld.compat.assets import AudioAsset, ImageAsset, VideoAsset


class ImageTestAssets(list[ImageAsset]):
    """The pictures that tests ask for."""

    def __init__(self) -> None:
        super().__init__(map(ImageAsset, ("stop_sign", "cherry_blossom")))


class VideoTestAssets(list[VideoAsset]):
    """The videos; one stands for vLLM's."""

    def __init__(self) -> None:
        super().__init__((VideoAsset("sample_demo_1.mp4"),))


class AudioTestAssets(list[AudioAsset]):
    """The sounds."""

    def __init__(self) -> None:
        super().__init__(map(AudioAsset, ("mary_had_lamb", "winning_call")))


__all__ = ["AudioTestAssets", "HfRunner", "ImageTestAssets", "LocalAssetServer", "VideoTestAssets", "VllmRunner"]
