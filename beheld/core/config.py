"""Configuration: the user's options, the engine's decisions, the checkpoint's facts and the device's measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import wraps
from math import inf, prod
from typing import Any, TypeVar

from beheld.core import vllm_options
from beheld.core.errors import ConfigError
from beheld.core.grounding import Grounding
from beheld.core.kv_transfer import KVTransferConfig
from beheld.core.pooling import DenseLayer, PoolerConfig, PoolerInfo
from beheld.core.request import LoRARequest
from beheld.core.sampling import LogprobsMode
from beheld.core.value_checks import known_keywords

T = TypeVar("T")

# Methods that quantize any checkpoint's weights as they are loaded: values of the option `quantization`.
QUANTIZED_AT_LOAD = ("fp8", "int4", "int8", "nf4")
# A checkpoint's method -> what the same name means for an unquantized checkpoint, whose weights are rounded at load.
AT_LOAD_AS = {"bitsandbytes": "nf4"}
# Methods of checkpoints whose weights may stay in their bits.
KEPT_BITS = ("auto-round", "awq", "compressed-tensors", "gptq")
# Methods that checkpoints may state; the option takes them too, if the checkpoint states the same.
QUANTIZED_CHECKPOINTS = (
    "auto-round", "awq", "bitsandbytes", "compressed-tensors", "fp8", "gguf", "gptq", "mxfp4", "torchao",
)  # fmt: skip


def _taking_vllm_options(kind: type[T]) -> type[T]:
    """Let the class take vLLM's further options as keywords, and name an unknown one in a ConfigError."""
    own = frozenset(each.name for each in fields(kind))  # type: ignore[arg-type]
    plain = kind.__init__

    @wraps(plain)
    def init(self: Any, *values: Any, **options: Any) -> None:
        left = vllm_options.take(options, own)
        known_keywords(kind, left, ConfigError, "engine option")
        if left.get("max_model_len") in ("auto", -1):
            left["max_model_len"] = None
        plain(self, *values, **left)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


@_taking_vllm_options
@dataclass
class EngineArgs:
    """Every option that a user can give to an engine. Names and meaning follow vLLM's class of the same name.

    The class is mutable on purpose: scripts change fields after construction and pass `asdict(args) | {...}` to `LLM`.
    None means that the user did not set the field. vLLM's other options are keywords without a field: see
    core/vllm_options.py.
    """

    model: str | None = None
    mmproj: str | None = None
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    task: str = "auto"
    runner: str = "auto"
    convert: str = "auto"
    override_pooler_config: dict[str, Any] | None = None
    pooler_config: dict[str, Any] | None = None
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
    kv_transfer_config: KVTransferConfig | dict[str, Any] | None = None
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
    data_parallel_size: int = 1
    data_parallel_backend: str = "mp"
    enable_expert_parallel: bool = False
    distributed_executor_backend: str | None = None
    mm_encoder_tp_mode: str = "weights"
    disable_custom_all_reduce: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    limit_mm_per_prompt: dict[str, int] | None = None
    language_model_only: bool = False
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_cache_gb: float | None = None
    disable_mm_preprocessor_cache: bool = False
    enable_mm_embeds: bool = True
    enable_prompt_embeds: bool = False
    encoder_urls: list[str] | None = None
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
    logprobs_mode: str = "raw_logprobs"
    served_model_name: str | list[str] | None = None
    disable_log_stats: bool = False
    use_tqdm_on_load: bool = True
    enable_sleep_mode: bool = False
    profiler_config: dict[str, Any] | None = None

    def keywords(self) -> dict[str, Any]:
        """Every option as a keyword of LLM and AsyncLLM."""
        return {each.name: getattr(self, each.name) for each in fields(EngineArgs)}

    @property
    def num_ranks(self) -> int:
        """How many processes are asked for to hold a part of the model, each engine's own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @classmethod
    def from_keywords(cls, options: Mapping[str, Any]) -> EngineArgs:
        """Build from keywords; an unknown one raises a ConfigError that names it and the nearest known one."""
        return cls(**options)


@dataclass(frozen=True)
class StateShape:
    """What one recurrent layer keeps of a sequence, whatever its length.

    Attributes:
        recurrent: shape of the recurrent state, which is float32.
        conv_channels, conv_length: of the short convolution before it: its channels, and how many positions it sees,
            its own included.
    """

    recurrent: tuple[int, ...]
    conv_channels: int
    conv_length: int

    def num_bytes(self, element_bytes: int) -> int:
        """Bytes of one layer's state, with the convolution's inputs of so many bytes each."""
        return 4 * prod(self.recurrent) + self.conv_channels * (self.conv_length - 1) * element_bytes


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep the same kind of state on the device and share one block table.

    Attributes:
        kind: what they keep; a key of scheduler/cache/registry.py and runner/cache/registry.py.
        layers: layer indices in the text model.
        num_kv_heads, head_dim, value_dim: shape of the key and the value at one position.
        values_in_keys: whether a value is the first `value_dim` numbers of its key, and takes no room of its own.
        window: how many positions the layers look back, the current one included; None for all.
        readers: pairs (layer, source layer). The layer has no keys and values of its own and reads those of the source,
            which is in `layers`.
        num_states: the most states of one media item, if the layers attend to item states instead of positions; else 0.
        state: what a layer keeps instead of keys and values, if it is recurrent; None otherwise.
        checkpoint_tokens: of a recurrent group: the positions between two states that are kept for other prompts.
    """

    kind: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    readers: tuple[tuple[int, int], ...] = ()
    num_states: int = 0
    state: StateShape | None = None
    checkpoint_tokens: int = 512
    values_in_keys: bool = False

    @property
    def has_keys_and_values(self) -> bool:
        """Whether each position has keys and values of several heads, and not a latent, inputs or a state."""
        return self.state is None and self.value_dim > 0 and not self.values_in_keys

    @property
    def keeps_all(self) -> bool:
        """Whether each position has keys and values, or a latent, for as long as its sequence runs."""
        has_own = self.has_keys_and_values or self.values_in_keys
        return has_own and self.window is None and not self.num_states

    @property
    def keeps_few(self) -> bool:
        """Whether there is room for few prefixes: they are recurrent states, or inputs of a short convolution."""
        return self.state is not None or self.value_dim == 0

    def bytes_per_token(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes of keys and values over all layers of the group, for one position or one item state.

        Args:
            scale_bytes: of the scale that each key has, and each value.
        """
        stored = self.head_dim + (0 if self.values_in_keys else self.value_dim)
        return len(self.layers) * self.num_kv_heads * (stored * element_bytes + 2 * scale_bytes)

    def bytes_per_sequence(self, element_bytes: int) -> int:
        """Bytes of one sequence's recurrent states over all layers of the group, whatever the sequence's length."""
        return 0 if self.state is None else len(self.layers) * self.state.num_bytes(element_bytes)


@dataclass(frozen=True)
class SecondaryWeights:
    """A further checkpoint that holds a part of a model's weights.

    Attributes:
        name: as config.json names it, or the user in its place.
        path: its local folder.
        prefix: stands before the names of its weights in the model.
        root: what these names begin with in this checkpoint, in place of `prefix`; its other weights are not read.
    """

    name: str
    path: str
    prefix: str
    root: str = ""


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the model, read from its checkpoint.

    Attributes:
        path: the checkpoint's local folder.
        name: the model's name as the user gave it.
        architecture: the class name in config.json.
        model_type: transformers' model_type.
        family: the model family's package, see families/registry.py; empty if there is none.
        checkpoint_dtype: the data type of the stored weights, such as "bfloat16".
        vocab_size: width of the logits.
        num_ids: a prompt's ids are below this number; in some families it exceeds `vocab_size`.
        hidden_size: hidden size of the text model and of its embeddings.
        num_layers: number of layers in the text model.
        max_model_len: the number of positions that the model supports.
        sparse_reach: the number of positions that it would support with the sparse attention of its indexer, if that is
            more than `max_model_len`, up to which the indexer picks all positions; else None.
        modalities: the media that the model accepts.
        placeholder_ids: modality -> the token id at the position of one embedding.
        position_axes: 1 for plain positions, 3 or 4 for multi-axis rotary ones; 2 for an encoder: position and type.
        eos_ids: ids that end an answer.
        pad_id: None if the model has none.
        kv_groups: the cache groups of the layers; a group that attends to item states comes last.
        atomic_spans: True if one step must compute each run of a media span's embeddings, because attention inside the
            run is bidirectional.
        both_ways: where attention is bidirectional: "nowhere", "media" (inside each run of a media item's embeddings),
            "whole media" (the same, and sliding layers see all of the run, however long), "windowed media" (in sliding
            layers only, as far as their window reaches), "joint" (between all prompt positions whose ids are in
            `joint_ids`; one step computes the first to the last of them), or "prompt" (the whole prompt; one step
            computes it, and no other prompt shares it).
        joint_ids: see `both_ways`.
        plain_attention: why only the backend in plain PyTorch computes its attention, as a half sentence; empty if all
            backends do.
        encoder_reads: for an encoder-decoder, what the encoder reads: "prompt", so that the decoder writes only the
            answer, or the modality of the one item of each prompt, which is the decoder's; empty for other models.
        decoder_start_id: the token that starts every answer of an encoder-decoder model.
        rope_switch: for models with two rotary scales, the longest sequence that uses the short scale. A longer prompt
            uses the long scale from its start; an answer ends where its sequence would have to switch.
        secondary: further checkpoints that hold parts of the model.
        pooler: how it makes vectors or scores of prompts; None for a model that generates.
        quantized_by: the checkpoint's `quant_method`; None if its weights are not quantized.
        call_formats, reasoning_formats: how the family's models write tool calls and reasoning; see Family.
        grounding: how they point at places in images; None if no notation is known.
        deeper: how many vectors of `hidden_size` follow each embedding of an image, for later layers.
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
    pad_id: int | None
    kv_groups: tuple[KVGroup, ...]
    atomic_spans: bool = False
    both_ways: str = "nowhere"
    joint_ids: frozenset[int] = frozenset()
    plain_attention: str = ""
    encoder_reads: str = ""
    decoder_start_id: int | None = None
    rope_switch: int | None = None
    sparse_reach: int | None = None
    family: str = ""
    secondary: tuple[SecondaryWeights, ...] = ()
    pooler: PoolerInfo | None = None
    quantized_by: str | None = None
    call_formats: tuple[str, ...] = ()
    reasoning_formats: tuple[str, ...] = ()
    grounding: Grounding | None = None
    deeper: int = 0

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a decoder attends to an encoder's states in every layer."""
        return bool(self.encoder_reads)

    @property
    def cross(self) -> KVGroup | None:
        """The group whose layers attend to states of media items, or None."""
        last = self.kv_groups[-1] if self.kv_groups else None
        return last if last is not None and last.num_states else None

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state that each position changes."""
        return any(group.state is not None for group in self.kv_groups)

    @property
    def paged_groups(self) -> tuple[KVGroup, ...]:
        """The groups that keep state of the text itself, in blocks."""
        return self.kv_groups if self.cross is None else self.kv_groups[:-1]


MODEL_CLASSES = (
    *(EngineArgs, ModelInfo, KVGroup, StateShape, SecondaryWeights, PoolerConfig, PoolerInfo, DenseLayer, Grounding),
    KVTransferConfig,
)
"""All classes of which an EngineArgs or a ModelInfo may hold values: codecs that send one to a process need them."""


class MediaWork(StrEnum):
    """What the media workers do: decode only, which needs no torch, or also run the model's processor."""

    DECODE = "decode"
    PROCESS = "process"


def longer_prompts(config: EngineConfig, info: ModelInfo) -> str:
    """Return what the operator can do about prompts that are too long, as `BeheldError` takes it; "" for nothing."""
    return "raise max_model_len" if config.max_model_len < info.max_model_len else ""


@dataclass(frozen=True)
class EngineConfig:
    """The engine's final decisions, made from EngineArgs, ModelInfo and the machine.

    Attributes:
        device: the platform's name in torch.
        dtype: data type of weights and activations, such as "float32".
        kv_dtype: data type of keys and values: `dtype`, int8 with a scale for each position and head, or float8_e4m3fn.
        max_model_len: the most tokens of prompt and answer together.
        max_num_seqs: the number of rows on the device.
        max_num_batched_tokens: the most positions that one step computes.
        block_size: positions in one KV block.
        max_encoder_tokens: the most embeddings, or item states, that the device keeps.
        processor_cache_bytes: size limit of the cache of processed media; 0 turns it off.
        limit_per_prompt: modality -> the most items in one request.
        overlap: plan and launch step N+1 before reading the tokens of step N.
        media_workers: number of processes that open media; 0 opens media in the caller's process.
        media_work: whether these processes also run the model's processor.
        prepare_threads: number of threads that prepare requests ahead of the engine; 0 prepares them in the caller's
            thread.
        max_loras: the most different LoRA adapters in one step; 0 turns LoRA off.
        max_lora_rank: the greatest rank of an adapter.
        max_cpu_loras: the most adapters in host memory.
        media_loras: pairs (modality, adapter) for requests that name no adapter, most important modality first.
        num_draft_tokens: the most draft tokens that one slice checks; 0 turns speculation off.
        max_logprobs: the most candidates that a request may ask for at each token; -1 for the whole vocabulary.
        logprobs_mode: what is reported as a token's log-probability.
        quantization: the method by which weights are quantized as they are loaded, of QUANTIZED_AT_LOAD; None for none.
        exact_weights: whether weights of few bits are dequantized everywhere, because float32 was asked for.
        tensor_parallel_size: the number of ranks that share the model, or each of its stages.
        pipeline_parallel_size: the number of stages, each of which holds some of the layers.
        expert_parallel: whether ranks share experts out whole, not a part of each.
        mm_encoder_tp_mode: whether ranks share the towers' layers ("weights") or the items ("data").
        over_hosts: whether Ray places the ranks, on several hosts.
        prompt_embeds: whether prompts may be embeddings.
        max_step_s: seconds that a step with prefill should take at most while others wait; None for no limit.
        kv_transfer: the folder in which keys and values of prompts are kept; None for none.
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
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    quantization: str | None = None
    exact_weights: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False
    mm_encoder_tp_mode: str = "weights"
    over_hosts: bool = False
    prompt_embeds: bool = False
    max_step_s: float | None = None
    kv_transfer: KVTransferConfig | None = None

    @property
    def kv_bytes(self) -> tuple[int, int]:
        """The bytes of a number of a key or value, and of the scale of one; see KVGroup.bytes_per_token."""
        sizes = {"float32": (4, 0), "bfloat16": (2, 0), "float16": (2, 0), "int8": (1, 4), "float8_e4m3fn": (1, 0)}
        return sizes[self.kv_dtype]

    @property
    def num_ranks(self) -> int:
        """How many processes hold a part of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def media_lora(self, items: Mapping[str, Sequence[Any]]) -> LoRARequest | None:
        """The adapter for a request that names none, chosen by its media; `items` maps modality to items."""
        return next((lora for modality, lora in self.media_loras if items.get(modality)), None)


@dataclass(frozen=True)
class TokenCost:
    """What one token costs, or a rank's part of it.

    Attributes:
        read_bytes: weights of the text layers and the head, which a step of one token reads; of experts those chosen.
        products: numbers of the text layers' weights that a token of a prompt is multiplied with.
        experts: whether it chooses experts.
    """

    read_bytes: int
    products: int
    experts: bool = False


@dataclass(frozen=True)
class Capacity:
    """The device's measured capacity, from which the scheduler allocates.

    Attributes:
        num_blocks: number of blocks of each KV group, including the null block 0.
        kv_bytes: memory of these blocks.
        max_encoder_tokens: the most embeddings, or item states, that may exist at once.
    """

    num_blocks: tuple[int, ...]
    kv_bytes: int = 0
    max_encoder_tokens: int = 0


@dataclass(frozen=True)
class MediaLimits:
    """Limits on media. Each is checked before the work that it limits.

    Attributes:
        max_item_bytes: compressed size of one item.
        max_fetched_bytes: bytes of fetched items, over all requests in preparation.
        max_pixels: pixels of one decoded image or one frame.
        max_pixels_per_byte: pixels per byte of an image file, checked above 16 million pixels. A photograph has about
            10, a drawing about 100; a far higher value means an empty image that only costs memory and time.
        max_scanned_pixels: pixels of an image times the scans of its file. A progressive JPEG has about 10 scans.
        max_frames: frames sampled from one video.
        max_pages: pages of one document that are read.
        max_video_pixels: pixels of all frames of one video that must be decoded to sample from it, those between two
            sampled ones included. 32 frames of an hour in 1920 x 1080 take about 8 thousand million.
        max_decoded_bytes: bytes of decoded pixels or samples, for one item and for all requests that are opened at
            once.
        max_audio_s: seconds of audio.
        max_audio_samples: decoded audio samples, summed over all channels.
        work_timeout_s: modality -> seconds for decoding and processing one item in a worker; "document": for inspecting
            one, whose pages are then images.
        max_work_bytes: memory that a worker may use for one item.
        image_formats: "usual" are PNG, JPEG, WebP, GIF and BMP; "all" are TIFF (its first page), ICO, PPM, AVIF and,
            where pillow-heif is installed, HEIC besides, whose decoders are looked at less often.
    """

    max_item_bytes: int = 256 << 20
    max_fetched_bytes: int = 1 << 30
    max_pixels: int = 128_000_000
    max_pixels_per_byte: int = 256
    max_scanned_pixels: int = 2_048_000_000
    max_frames: int = 2048
    max_pages: int = 100
    max_video_pixels: int = 32_000_000_000
    max_decoded_bytes: int = 1 << 30
    max_audio_s: float = 3600.0
    max_audio_samples: int = 400_000_000
    work_timeout_s: Mapping[str, float] = field(
        default_factory=lambda: {"image": 20.0, "video": 120.0, "audio": 60.0, "document": 20.0}
    )
    max_work_bytes: int = 4 << 30
    image_formats: str = "usual"

    @classmethod
    def within(cls, options: Mapping[str, Any] | None, num_bytes: int) -> dict[str, Any]:
        """`options`, with lower values for those left out where the defaults could take more than `num_bytes`.

        An image takes up to 30 bytes per pixel at its peak, in the worker and where it is processed; half of the
        memory stays for the engine.
        """
        plain = cls()
        fitting = {
            "max_pixels": max(1_000_000, num_bytes // 80),
            "max_item_bytes": max(1 << 20, num_bytes // 8),
            "max_fetched_bytes": max(1 << 20, num_bytes // 8),
            "max_decoded_bytes": max(4 << 20, num_bytes // 16),
            "max_work_bytes": max(64 << 20, num_bytes // 2),
        }
        lower = {name: most for name, most in fitting.items() if most < getattr(plain, name)}
        return {**lower, **(options or {})}

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> MediaLimits:
        """The defaults, overridden by `options`.

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
            if name == "image_formats":
                if value not in ("usual", "all"):
                    raise ConfigError(
                        f"media_limits: image_formats must be usual or all, got {value!r}.", param="media_limits"
                    )
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
