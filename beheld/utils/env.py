"""All environment variables that beheld reads, typed, in one table.

Each is a function that reads the variable when called, so tests and scripts can set it late. If vLLM has a variable
with the same meaning, its name also works; ours takes precedence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TABLE: dict[str, tuple[str, ...]] = {}
_READERS: list[Callable[[], object]] = []


def check() -> None:
    """Raise a ValueError for a variable with an invalid value; it names the variable and says what is valid."""
    for value in _READERS:
        value()


def set_log_level(level: str) -> None:
    """Set BEHELD_LOG_LEVEL for this process and those that it starts."""
    os.environ["BEHELD_LOG_LEVEL"] = level


def _variable(names: tuple[str, ...], read: Callable[[str], T], default: T, doc: str) -> Callable[[], T]:
    def value() -> T:
        for name in names:
            text = os.environ.get(name)
            if text is not None and text != "":
                try:
                    return read(text)
                except ValueError as error:
                    raise ValueError(f"{name}={text!r} is not valid: {doc}") from error
        return default

    value.__doc__ = doc
    TABLE[names[0]] = (*names[1:], doc)
    _READERS.append(value)
    return value


def _switch(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 86400:
        raise ValueError(text)
    return seconds


def _gib(text: str) -> float:
    gib = float(text)
    if not 0 <= gib < 2**20:
        raise ValueError(text)
    return gib


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= 1024:
        raise ValueError(text)
    return count


def _factor(text: str) -> float:
    factor = float(text)
    if not 1 <= factor <= 1000:
        raise ValueError(text)
    return factor


def _secret(text: str) -> str:
    if len(text) < 16 or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(text)
    return text


def _level(text: str) -> str:
    upper = text.strip().upper()
    if upper not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(text)
    return upper


LOG_LEVEL = _variable(("BEHELD_LOG_LEVEL", "VLLM_LOGGING_LEVEL"), _level, "", "one of DEBUG, INFO, WARNING, ERROR")
IMAGE_FETCH_TIMEOUT = _variable(
    ("BEHELD_IMAGE_FETCH_TIMEOUT", "VLLM_IMAGE_FETCH_TIMEOUT"), _seconds, 5.0, "seconds for fetching an image"
)
VIDEO_FETCH_TIMEOUT: Callable[[], float | None] = _variable(
    ("BEHELD_VIDEO_FETCH_TIMEOUT", "VLLM_VIDEO_FETCH_TIMEOUT"),
    _seconds,
    None,
    "seconds for fetching a video; if not set, 10, extended up to 30 while data arrives",
)
AUDIO_FETCH_TIMEOUT = _variable(
    ("BEHELD_AUDIO_FETCH_TIMEOUT", "VLLM_AUDIO_FETCH_TIMEOUT"), _seconds, 10.0, "seconds for fetching an audio clip"
)
MEDIA_CACHE = _variable(
    ("BEHELD_MEDIA_CACHE",),
    str,
    "",
    "a folder with local copies of URLs (HOST/PATH, as `wget -x` stores them), searched before the network",
)
ASSETS_CACHE = _variable(
    ("BEHELD_ASSETS_CACHE", "VLLM_ASSETS_CACHE"),
    str,
    os.path.join("~", ".cache", "beheld", "assets"),
    "the folder with the example images, videos and audio clips that scripts request by name",
)
GGUF_CACHE = _variable(
    ("BEHELD_GGUF_CACHE",),
    str,
    os.path.join("~", ".cache", "beheld", "gguf"),
    "the folder with the configurations and tokenizers that were made of GGUF files",
)
CODE_CACHE = _variable(
    ("BEHELD_CODE_CACHE",),
    str,
    os.path.join("~", ".cache", "beheld", "code"),
    "the folder that keeps machine code compiled for this CPU; 0 keeps none",
)
ENCODER_TOKEN = _variable(
    ("BEHELD_ENCODER_TOKEN",), _secret, "", "the secret of at least 16 characters that encoders and their clients share"
)
GRAMMAR_TIMEOUT = _variable(("BEHELD_GRAMMAR_TIMEOUT",), _seconds, 5.0, "seconds for compiling a grammar")
CPU_KV_CACHE_GIB = _variable(
    ("BEHELD_CPU_KV_CACHE_GIB", "VLLM_CPU_KVCACHE_SPACE"),
    _gib,
    0.0,
    "GiB of KV cache on a CPU; 0 lets the engine decide",
)
HOST_SHARES = _variable(
    ("BEHELD_HOST_SHARES", "VLLM_DP_SIZE", "LOCAL_WORLD_SIZE"),
    _count,
    1,
    "how many engines share a CPU's memory; set for those of data_parallel_size, by scripts that start their own, and "
    "by torchrun",
)
PROFILES = _variable(
    ("BEHELD_PROFILES", "VLLM_TORCH_PROFILER_DIR"), str, "vllm_profile", "the folder that profiles are written into"
)
OPERATOR_ROUTES = _variable(
    ("BEHELD_OPERATOR_ROUTES", "VLLM_SERVER_DEV_MODE"), _switch, False, "1 is the same as `--operator-routes`"
)
CHANGE_LORAS = _variable(
    ("BEHELD_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    _switch,
    False,
    "1 is the same as `--allow-runtime-lora-updating`",
)
SAGEMAKER_SESSIONS = _variable(
    ("BEHELD_SAGEMAKER_SESSIONS", "SAGEMAKER_ENABLE_STATEFUL_SESSIONS"),
    _switch,
    False,
    "1 is the same as `--sagemaker-sessions`",
)
ALLOW_PRIVATE_FETCH = _variable(
    ("BEHELD_ALLOW_PRIVATE_FETCH",), _switch, False, "1 allows fetching media from private and loopback addresses"
)
FUSE = _variable(("BEHELD_FUSE",), _switch, True, "0 keeps q/k/v and gate/up as separate matrices")
COMPILE = _variable(("BEHELD_COMPILE",), _switch, True, "0 turns off compilation of the decoder layers on a GPU")
FP8 = _variable(
    ("BEHELD_FP8",),
    _switch,
    True,
    "0 dequantizes FP8 weights at load even if the GPU can multiply them",
)
INT4_ON_GPU = _variable(
    ("BEHELD_INT4_ON_GPU",),
    _switch,
    True,
    "0 dequantizes weights of 4 bits at load even if the GPU can multiply them as they are",
)
INT8_ON_GPU = _variable(
    ("BEHELD_INT8_ON_GPU",),
    _switch,
    False,
    "1 leaves weights of 8 bits as they are where a GPU can multiply them; its kernels have not run on a GPU yet",
)
FLOAT8_ONE_ROW = _variable(
    ("BEHELD_FLOAT8_ONE_ROW",),
    _switch,
    True,
    "0 computes a single row with FP8 weights as many rows on a GPU, not by a kernel of its own",
)
LATENT_ROWS = _variable(
    ("BEHELD_LATENT_ROWS",),
    _switch,
    True,
    "0 computes a single row of layers of latent attention as compiled on a GPU, not in few launches of kernels",
)
GATED_ROWS = _variable(
    ("BEHELD_GATED_ROWS",),
    _switch,
    True,
    "0 computes a single row of layers with gates (Qwen3.5) as compiled on a GPU, not in few launches of kernels",
)
KEEP_BITS = _variable(
    ("BEHELD_KEEP_BITS",),
    _switch,
    True,
    "0 dequantizes weights of 4 or 8 bits at load even if the device can multiply them as they are",
)
PEER_SUMS = _variable(
    ("BEHELD_PEER_SUMS",),
    _switch,
    True,
    "0 leaves all sums over GPUs to their vendor's library, where GPUs could write to one another's memory",
)
ONE_GPU = _variable(
    ("BEHELD_ONE_GPU",),
    _switch,
    False,
    "1 puts all ranks of a model on one GPU and adds up over gloo, to try several ranks where there is one GPU: slow, "
    "and `enforce_eager` and `kv_cache_memory_bytes` must be given",
)
HANG_FACTOR = _variable(
    ("BEHELD_HANG_FACTOR",),
    _factor,
    1.0,
    "from 1 to 1000: how many times as long as usual other ranks are waited for before they count as hanging",
)
