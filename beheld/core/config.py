"""Configuration: what the user says, what was decided, what the checkpoint says, what the device measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

from beheld.core.errors import ConfigError
from beheld.core.params import known_keywords
from beheld.core.request import LoRARequest


@dataclass
class EngineArgs:
    """Everything a user can say about an engine. Names and meaning are those of vLLM's class of this name.

    Mutable on purpose: scripts change fields after construction, and pass `asdict(args) | {...}` to `LLM`. A field that
    is None was not said. What has no meaning here is not a field, and `LLM` refuses it by name.
    """

    model: str | None = None
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    task: str = "auto"
    runner: str = "auto"
    trust_remote_code: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    hf_token: bool | str | None = None
    hf_overrides: dict[str, Any] | Callable[[Any], Any] | None = None
    config_format: str = "auto"
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    dtype: str = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    swap_space: float | None = None
    cpu_offload_gb: float | None = None
    enforce_eager: bool = False
    device: str = "auto"
    attention_backend: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    disable_custom_all_reduce: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    limit_mm_per_prompt: dict[str, int] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_cache_gb: float | None = None
    disable_mm_preprocessor_cache: bool = False
    enable_mm_embeds: bool = True
    mm_encoder_budget: int | None = None
    media_workers: int | None = None
    media_work: str = "auto"
    media_limits: dict[str, Any] | None = None
    strict_media: bool = False
    allowed_local_media_path: str = ""
    allowed_media_domains: list[str] | None = None
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    logits_processors: list[Any] | None = None
    max_logprobs: int = 20
    served_model_name: str | list[str] | None = None
    disable_log_stats: bool = False
    use_tqdm_on_load: bool = True
    enable_sleep_mode: bool = False

    def __new__(cls, *_: Any, **options: Any) -> EngineArgs:
        """Refuse unknown keywords by name, where dataclasses would only raise a TypeError."""
        known_keywords(cls, options, ConfigError, "engine option")
        return super().__new__(cls)

    @classmethod
    def from_keywords(cls, options: Mapping[str, Any]) -> EngineArgs:
        """Build from keywords; an unknown one is a ConfigError that names it and the nearest known one."""
        return cls(**options)


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep the same on the device and share one block table.

    Attributes:
        kind: what they keep, as scheduler/cache/registry.py and runner/cache/registry.py name it.
        layers: the text model's layer indices.
        num_kv_heads, head_dim, value_dim: shape of a key and of a value at one position.
        window: for how many positions back something is kept, the position itself included; None for all.
        readers: pairs (layer, layer of `layers` whose keys and values it reads): layers without any of their own.
        num_states: if they attend to states of media items and not to positions, the most states of one item; else 0.
    """

    kind: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    readers: tuple[tuple[int, int], ...] = ()
    num_states: int = 0

    def bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values of one position, or of one state of an item, over all layers of the group."""
        return len(self.layers) * self.num_kv_heads * (self.head_dim + self.value_dim) * element_bytes


@dataclass(frozen=True)
class ModelInfo:
    """What the checkpoint says.

    Attributes:
        path: local folder of the checkpoint.
        name: what the user called it.
        architecture: the class name in config.json.
        model_type: transformers' model_type.
        family: the package of its family, see families/registry.py; empty if it has none of its own.
        checkpoint_dtype: the type its weights are stored in, as "bfloat16".
        vocab_size: width of the logits.
        num_ids: ids below this may stand in a prompt; in some families that are more than the head knows.
        hidden_size: of the text model, hence of an embedding.
        num_layers: of the text model.
        max_model_len: positions the model was made for.
        modalities: what it accepts besides text.
        placeholder_ids: modality -> the token id that marks one embedding's place.
        position_axes: 1 for plain positions, 3 or 4 for multi-axis rotary ones.
        eos_ids: ids that end an answer.
        bos_id, pad_id: if it has them.
        kv_groups: what its layers keep on the device; a group that attends to states of items comes last.
        atomic_spans: True if each run of a media span's embeddings must be computed in one step (attention within it
            runs both ways).
        both_ways: where attention also looks ahead: "nowhere", "media" (within each run of a media item's embeddings),
            "windowed media" (the same in sliding layers alone), "joint" (between all positions of the prompt whose ids
            are in `joint_ids`; from the first to the last, they are computed in one step), or "prompt" (within the
            whole prompt, which is then computed in one step and never shared).
        joint_ids: see `both_ways`.
        is_encoder_decoder: True for models whose encoder reads the prompt, and whose decoder writes the answer alone.
        decoder_start_id: the token that starts every answer of such a model.
        rope_switch: in models with two rotary scales, the longest sequence that has the short one. A longer prompt has
            the long one from its start; an answer ends where a sequence would change.
    """

    path: str
    name: str
    architecture: str
    model_type: str
    checkpoint_dtype: str
    vocab_size: int
    num_ids: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    modalities: tuple[str, ...]
    placeholder_ids: Mapping[str, int]
    position_axes: int
    eos_ids: frozenset[int]
    bos_id: int | None
    pad_id: int | None
    kv_groups: tuple[KVGroup, ...]
    atomic_spans: bool = False
    both_ways: str = "nowhere"
    joint_ids: frozenset[int] = frozenset()
    is_encoder_decoder: bool = False
    decoder_start_id: int | None = None
    rope_switch: int | None = None
    family: str = ""

    @property
    def cross(self) -> KVGroup | None:
        """The group whose layers attend to states of media items, if there is one."""
        last = self.kv_groups[-1]
        return last if last.num_states else None

    @property
    def paged_groups(self) -> tuple[KVGroup, ...]:
        """The groups that keep something of the text itself, in blocks."""
        return self.kv_groups if self.cross is None else self.kv_groups[:-1]


class MediaWork(StrEnum):
    """What the processes that open media do: decode, which needs no torch, or run the model's processor too."""

    DECODE = "decode"
    PROCESS = "process"


@dataclass(frozen=True)
class EngineConfig:
    """What was decided from EngineArgs, ModelInfo and the machine; every field is final.

    Attributes:
        device: the name of its platform, as torch has it.
        dtype: type of weights and activations, as "float32".
        kv_dtype: type of keys and values.
        max_model_len: prompt and answer together, in tokens.
        max_num_seqs: rows on the device.
        max_num_batched_tokens: positions computed in one step.
        block_size: positions in one KV block.
        max_encoder_tokens: embeddings, or states of items, kept on the device.
        processor_cache_bytes: bound of the cache of processed media; 0 switches it off.
        limit_per_prompt: modality -> most items in one request.
        overlap: plan and launch step N+1 before step N's tokens were read.
        media_workers: processes that open media; 0 means the caller's own.
        media_work: what else they do.
        prepare_threads: threads that prepare requests ahead of the engine; 0 means the caller's own.
        max_loras: different LoRA adapters in one step; 0 if requests cannot have any.
        max_lora_rank: the greatest rank of one.
        max_cpu_loras: how many are kept in the host's memory.
        media_loras: pairs (modality, adapter) for requests that name none, most important modality first.
        num_draft_tokens: the most draft tokens that one slice checks; 0: the engine does not speculate.
    """

    device: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_encoder_tokens: int
    processor_cache_bytes: int
    limit_per_prompt: Mapping[str, int]
    prefix_caching: bool = True
    chunked_prefill: bool = True
    policy: str = "fcfs"
    overlap: bool = False
    seed: int = 0
    load_format: str = "auto"
    enforce_eager: bool = False
    attention_backend: str | None = None
    memory_fraction: float = 0.9
    kv_cache_bytes: int | None = None
    num_blocks_override: int | None = None
    trust_remote_code: bool = False
    logits_processors: tuple[Any, ...] = ()
    show_progress: bool = True
    media_workers: int = 0
    media_work: MediaWork = MediaWork.DECODE
    prepare_threads: int = 0
    max_loras: int = 0
    max_lora_rank: int = 16
    max_cpu_loras: int = 1
    media_loras: tuple[tuple[str, LoRARequest], ...] = ()
    num_draft_tokens: int = 0

    def media_lora(self, items: Mapping[str, Sequence[Any]]) -> LoRARequest | None:
        """The adapter for a request with these items by modality, if it names none itself."""
        return next((lora for modality, lora in self.media_loras if items.get(modality)), None)


@dataclass(frozen=True)
class Capacity:
    """What the device measured: what the scheduler may hand out.

    Attributes:
        num_blocks: for each KV group, how many blocks there are, the null block 0 included.
        kv_bytes: memory that they take.
        max_encoder_tokens: embeddings, or states of items, that may live at once.
    """

    num_blocks: tuple[int, ...]
    kv_bytes: int = 0
    max_encoder_tokens: int = 0


@dataclass(frozen=True)
class MediaLimits:
    """Bounds on media, applied before the work that they bound.

    Attributes:
        max_item_bytes: compressed size of one item.
        max_fetched_bytes: of items that were fetched from other machines, of all requests in preparation.
        max_pixels: of one decoded image or of one frame.
        max_pixels_per_byte: of an image's file, where it has more than 16 million pixels. A photograph has some 10, a
            drawing some 100; far more of them is emptiness that only costs its reader.
        max_frames: decoded from one video.
        max_decoded_bytes: of one item's pixels or samples, and of those of all requests that are opened at a time.
        max_audio_s: seconds of audio.
        max_audio_samples: samples of audio as they are decoded, of all channels.
        work_timeout_s: modality -> seconds for decoding and processing one item in a worker.
        max_work_bytes: memory that a worker may take for one item.
    """

    max_item_bytes: int = 256 << 20
    max_fetched_bytes: int = 1 << 30
    max_pixels: int = 128_000_000
    max_pixels_per_byte: int = 256
    max_frames: int = 2048
    max_decoded_bytes: int = 1 << 30
    max_audio_s: float = 3600.0
    max_audio_samples: int = 400_000_000
    work_timeout_s: Mapping[str, float] = field(default_factory=lambda: {"image": 20.0, "video": 120.0, "audio": 60.0})
    max_work_bytes: int = 4 << 30

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> MediaLimits:
        """The defaults with what was said of them.

        Raises:
            ConfigError: a name is unknown, or a value is not a number above 0.
        """
        plain, given = cls(), dict(options or {})
        known_keywords(cls, given, ConfigError, "limit of media_limits")
        timeouts = given.get("work_timeout_s", {})
        if not isinstance(timeouts, Mapping):
            raise ConfigError("media_limits: work_timeout_s must be a mapping.", param="media_limits")
        for modality in timeouts:
            if modality not in plain.work_timeout_s:
                raise ConfigError(f"media_limits: there is no modality {modality!r}.", param="media_limits")
        for name, value in (*given.items(), *timeouts.items()):
            if name == "work_timeout_s":
                continue
            seconds = name in timeouts or name == "max_audio_s"
            if isinstance(value, bool) or not isinstance(value, int | float if seconds else int) or not 0 < value < inf:
                kind = "number" if seconds else "whole number"
                raise ConfigError(
                    f"media_limits: {name} must be a {kind} above 0, got {value!r}.", param="media_limits"
                )
        if "work_timeout_s" in given:
            given["work_timeout_s"] = {**plain.work_timeout_s, **timeouts}
        return cls(**given)
