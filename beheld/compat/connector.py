"""MediaConnector, which scripts fetch media with, over the engine's guarded fetcher."""

from __future__ import annotations

import asyncio
from typing import Any

from beheld.compat import media
from beheld.core.config import MediaLimits
from beheld.inputs.fetch.fetch import FetchRules


class MediaConnector:
    """Fetches media from http(s) and data URLs, and from a folder if one is allowed.

    Args:
        media_io_kwargs: how media are read, as {"video": {"num_frames": 16}}.
        connection: what vLLM opens connections with; it has no use here.
        allowed_local_media_path: a folder whose files may be named.
        allowed_media_domains: the only hosts; None for all that are public.
    """

    def __init__(
        self,
        media_io_kwargs: dict[str, dict[str, Any]] | None = None,
        connection: Any = None,
        *,
        allowed_local_media_path: str = "",
        allowed_media_domains: list[str] | None = None,
    ) -> None:
        self._options = media_io_kwargs or {}
        self._rules = FetchRules.of(allowed_local_media_path, allowed_media_domains, MediaLimits(image_formats="all"))

    def fetch_image(self, image_url: str, *, image_mode: str = "RGB") -> Any:
        """See compat.media.fetch_image."""
        return media.fetch_image(image_url, image_mode=image_mode, rules=self._rules)

    def fetch_video(self, video_url: str, *, image_mode: str = "RGB") -> tuple[Any, dict[str, Any]]:
        """See compat.media.fetch_video; `num_frames` and `fps` are those of `media_io_kwargs`."""
        options = {name: self._options.get("video", {}).get(name) for name in ("num_frames", "fps")}
        return media.fetch_video(video_url, rules=self._rules, **options)

    def fetch_audio(self, audio_url: str) -> tuple[Any, int]:
        """See compat.media.fetch_audio."""
        return media.fetch_audio(audio_url, rules=self._rules)

    async def fetch_image_async(self, image_url: str, *, image_mode: str = "RGB") -> Any:
        """The same in a thread."""
        return await asyncio.to_thread(self.fetch_image, image_url, image_mode=image_mode)

    async def fetch_video_async(self, video_url: str, *, image_mode: str = "RGB") -> tuple[Any, dict[str, Any]]:
        """The same in a thread."""
        return await asyncio.to_thread(self.fetch_video, video_url, image_mode=image_mode)

    async def fetch_audio_async(self, audio_url: str) -> tuple[Any, int]:
        """The same in a thread."""
        return await asyncio.to_thread(self.fetch_audio, audio_url)
