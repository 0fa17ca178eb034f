"""The only use of FFmpeg: opens bytes as a container of a kind that holds its audio and frames itself."""

from __future__ import annotations

import io
from typing import Any

from beheld.core.errors import DecodeError

# Names of FFmpeg's readers. Left out are those that open something else on the bytes' behalf: playlists and lists of
# files (concat, hls, dash, imf), session descriptions (sdp, which listens on the network), devices, scripts.
FORMATS = (
    "aac,ac3,aiff,amr,amrnb,amrwb,ape,asf,au,avi,caf,flac,flv,gif,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mp3,mpeg,mpegts,"
    "mpegvideo,ogg,rm,tta,voc,w64,wav,webm,wv"
)


def opened(data: bytes) -> Any:
    """Open these bytes with PyAV, which reads nothing else.

    Raises:
        av.FFmpegError: the kind is not in FORMATS, or the bytes are broken.
    """
    import av

    options = {"format_whitelist": FORMATS, "protocol_whitelist": "data"}
    return av.open(io.BytesIO(data), mode="r", metadata_errors="ignore", options=options)


def check_codec(stream: Any, modality: str) -> None:
    """Refuse a stream that nothing here decodes.

    Raises:
        DecodeError: its codec is not known.
    """
    if stream.codec_context is None:
        raise DecodeError(f"The file's {modality} has a codec that is not known here.", "Send it in another format.")
