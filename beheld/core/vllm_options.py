"""Options of vLLM's engine that are no fields of EngineArgs: accepted without effect, or refused with what to do."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from beheld.core.errors import ConfigError


@dataclass(frozen=True)
class VllmOption:
    """One option that vLLM has and beheld has not.

    Attributes:
        why: why it has no effect, for the log and the documentation; "" if it is refused.
        remedy: what to do instead, if it is refused.
        values: how many words belong to its flag; 0 for a switch.
        only: the values without effect; others are refused. Empty: any.
        unread: whether a list of file patterns has no effect if each begins with one of these.
        fields: of a configuration the fields without effect, each with its values; no values: any.
    """

    why: str = ""
    remedy: str = ""
    values: int = 0
    only: tuple[Any, ...] = ()
    unread: tuple[str, ...] = ()
    fields: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def refuses(self, value: Any) -> bool:
        """Whether this value would have an effect that beheld does not offer. An unset one never has."""
        if value is None or value is False or value in ("", 0) or value == () or value == [] or value == {}:
            return False
        if self.unread:
            patterns = list(value) if isinstance(value, list | tuple | set) else [value]
            return not all(str(pattern).startswith(self.unread) for pattern in patterns)
        if self.fields:
            given = _fields_of(value)
            return given is None or any(
                each and (name not in self.fields or (self.fields[name] and each not in self.fields[name]))
                for name, each in given.items()
            )
        return value not in self.only if self.only else not self.why


def _fields_of(value: Any) -> Mapping[str, Any] | None:
    """The fields of a configuration: scripts give it as a dict or an object, command lines as its JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None
    return value if isinstance(value, Mapping) else getattr(value, "__dict__", None)


OPTIONS: dict[str, VllmOption] = {}


def _accepted(why: str, values: str = "", switches: str = "") -> None:
    for names, count in ((values, 1), (switches, 0)):
        OPTIONS.update({name: VllmOption(why, values=count) for name in names.split()})


def _refused(remedy: str, values: str = "", switches: str = "", only: tuple[Any, ...] = ()) -> None:
    for names, count in ((values, 1), (switches, 0)):
        OPTIONS.update({name: VllmOption("", remedy, count, only) for name in names.split()})


# ---------------------------------------------------------------------- accepted
_accepted(
    "kernels are chosen by device and data type",
    "ir_op_priority moe_backend linear_backend sparse_indexer_topk_backend all2all_backend mm_encoder_attn_backend "
    "attention_config mamba_config kernel_config mamba_backend mamba_ssu_algorithm gdn_prefill_backend "
    "kda_prefill_backend kda_decode_backend replayssm_buffer_len",
    "enable_flashinfer_autotune monokernel disable_cascade_attn use_replayssm",
)
_accepted(
    "`enforce_eager` alone switches graphs and compiling",
    "compilation_config cudagraph_capture_sizes cuda_graph_sizes max_cudagraph_capture_size optimization_level "
    "performance_mode jit_monitor_mode",
    "jit_monitor_verbose",
)
_accepted(
    "processes find each other by themselves",
    "distributed_timeout_seconds cpu_distributed_timeout_seconds dp_sync_interval numa_bind_nodes numa_bind_cpus",
    "numa_bind disable_nccl_for_dp_synchronization enable_shm_tensor_arena ray_workers_use_nsight "
    "enable_nccl_comm_suspend",
)
_accepted(
    "experts are placed evenly",
    "eplb_config expert_placement_strategy ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
    "elastic_ep_max_dp_size",
    "enable_eplb enable_dbo enable_ep_weight_filter enable_elastic_ep enable_hc_sp enable_batch_sharded_sampling",
)
_accepted(
    "the cache of keys and values arranges itself",
    "prefix_cache_retention_interval kv_cache_dtype_skip_layers mamba_block_size prefix_match_unit mamba_cache_mode "
    "offload_backend cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params "
    "kv_offloading_size kv_offloading_backend watermark",
    "disable_hybrid_kv_cache_manager enable_mamba_shared_prefix_checkpoint kv_sharing_fast_prefill swa_bounded_replay",
)
_accepted("blocks are known by whole digests", "prefix_caching_hash_algo")
_accepted(
    "`max_num_seqs` and `max_num_batched_tokens` decide what a step computes",
    "max_num_scheduled_tokens long_prefill_token_threshold max_num_active_seqs prefill_schedule_interval "
    "max_num_partial_prefills max_long_partial_prefills",
    "long_prefill_token_threshold_adaptive disable_chunked_mm_input scheduler_reserve_full_isl",
)
_accepted(
    "the log has one line for each request, without its content; BEHELD_LOG_LEVEL says what is logged",
    "logging_config log_level log_config_file",
    "enable_log_requests aggregate_engine_logging enable_logging_iteration_details",
)
_accepted(
    "/metrics has a fixed list of figures",
    "show_hidden_metrics_for_version per_request_spec_decode_metrics kv_cache_metrics_sample custom_histogram_buckets",
    "kv_cache_metrics cudagraph_metrics enable_mfu_metrics enable_mm_processor_stats enable_layerwise_nvtx_tracing",
)
_accepted(
    "weights are read by one process",
    "max_parallel_loading_workers safetensors_load_strategy safetensors_prefetch_num_threads "
    "safetensors_prefetch_block_size pt_load_map_location",
)
_accepted("there is one implementation of each model", "model_impl")
_accepted("the method of the checkpoint is used", switches="allow_deprecated_quantization")
_accepted("items always stand where they were written", switches="interleave_mm_strings")
_accepted("`mm_encoder_tp_mode` says where encoders are computed", switches="enable_multimodal_encoder_data_parallel")
_accepted("there is one kind of cache of media", "mm_processor_cache_type mm_shm_cache_max_object_size_mb")
_accepted("media are known by whole digests", "mm_hasher_algorithm")
_accepted("`media_workers` says who prepares media", "renderer_num_workers mm_tensor_ipc mm_ipc_gpu_memory_gb")
_accepted("the memory of media is always measured at start", switches="skip_mm_profiling")
_accepted("float8 attention of media is never used", "mm_encoder_fp8_scale_save_margin")
_accepted(
    "adapters are computed in one form",
    switches="fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format",
)
_accepted(
    "a sleeping engine gives all back but weights in the host's memory, and captures graphs anew",
    "sleep_mode_backend sleep_preserve_parameter_names",
    "sleep_mode_offload_cudagraph",
)
_accepted("the allocator is torch's", switches="enable_cumem_allocator")
_accepted("pieces of a stream are sent as they come", "stream_interval")
_accepted("the command line always checks the variables", switches="fail_on_environ_validation")
_accepted("`--drain-timeout` says how long a server waits", "shutdown_timeout")
_accepted("the engine watches itself", "watchdog_config fault_tolerance_config", "enable_fault_tolerance")
_accepted("one process prepares requests", "_api_process_count _api_process_rank")
_accepted("encoder states are shared by content", "ec_manager_config")
_accepted("states of recurrent layers are rounded to nearest", "mamba_cache_philox_rounds")

_accepted(
    "no token is guessed ahead, and answers are the same without",
    "speculative_config spec_method spec_model spec_tokens",
)

# ---------------------------------------------------------------------- refused
_OUT = "Leave it out."
OPTIONS["structured_outputs_config"] = VllmOption(
    "",
    "Leave the rest out: llguidance compiles all grammars, with at most one space between tokens of JSON.",
    1,
    fields={
        "backend": ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"),
        "disable_any_whitespace": (),
        "disable_additional_properties": (),
        "reasoning_parser": (),
    },
)
_refused(
    "Set hf_overrides for fields of config.json, or give a folder with the file.",
    "hf_config_path model_class_overrides",
)
_refused("Give a folder or a hub name as the model.", "model_weights")
_refused("`revision` is that of the code too.", "code_revision")
_refused("Embeddings of media are taken; prompts are text or ids.", switches="tokens_only")
_refused(
    "Answers have tokens and log-probabilities; leave it out.",
    "aux_output_config",
    "enable_return_routed_experts return_sampling_mask enable_trace_replay",
)
_refused("Leave it out.", switches="use_fp64_gumbel")
_HOSTS = "distributed_executor_backend='ray' starts the ranks on the hosts of a Ray cluster; leave it out."
_refused(_HOSTS, "master_addr", only=("127.0.0.1", "localhost"))
_refused(_HOSTS, "master_port", only=(29501, "29501"))
_refused(_HOSTS, "nnodes", only=(1, "1"))
_refused(_HOSTS, "node_rank", only=("0",))
_refused("Name the GPUs in CUDA_VISIBLE_DEVICES.", "device_ids")
_refused(
    "Use tensor_parallel_size or data_parallel_size.",
    "prefill_context_parallel_size decode_context_parallel_size dcp_kv_cache_interleave_size "
    "cp_kv_cache_interleave_size",
    only=(1, "1"),
)
_refused("Use tensor_parallel_size or data_parallel_size.", "dcp_comm_backend", "dcp_q_replicate")
_refused(
    "data_parallel_size starts all engines, with data_parallel_backend='ray' on the hosts of a Ray cluster; leave it "
    "out.",
    "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port",
    "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb",
)
_refused("hf_overrides may change the window in config.json.", switches="disable_sliding_window")
_refused(
    "`--max-concurrent-requests` of the server limits waiting requests.", "max_num_queued_reqs max_num_queued_tokens"
)
_refused("`quantization` names the method.", "quantization_config")
_refused("Use a model that makes vectors, with runner='pooling'.", switches="mm_encoder_only")
_refused(
    "Media are computed in the type of `dtype`; leave it out.",
    "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path",
)
_refused("Set the processor's options in mm_processor_kwargs.", "video_pruning_rate")
_refused("Set the processor's options in mm_processor_kwargs.", "video_pruning_method", only=("evs",))
_refused("Media are prepared on the CPU; leave it out.", "mm_processor_device", only=("auto", "cpu"))
_refused("Media are prepared on the CPU; leave it out.", switches="mm_device_do_normalize")
_refused("Write the processor as code before the engine.", "io_processor_plugin")
_refused("Name the adapter in each request.", "default_mm_loras")
_refused("Adapters are computed in the type of `dtype`; leave it out.", "lora_dtype", only=("auto",))
_refused("Adapters say themselves what they change; leave it out.", "lora_target_modules max_lora_cls_labels")
_refused(
    "Adapters say themselves what they change; leave it out.",
    switches="enable_tower_connector_lora enable_moe_shared_loras",
)
_refused("`load_format` needs no options; leave it out.", "model_loader_extra_config")
# A publisher's own layout is not read in any case.
OPTIONS["ignore_patterns"] = VllmOption(
    "", "Remove the files from the folder.", 1, unread=("original/", "consolidated")
)
_refused("`--reasoning-parser think` of the server separates reasoning.", "reasoning_config")
_refused("It is a flag of the server; scripts get the whole text.", "reasoning_parser_plugin")
_refused("Texts are not marked; leave it out.", "watermark_config")
_refused("Models answer token by token; leave it out.", "diffusion_config engram_config")
_refused("Read /metrics or the server's log.", "otlp_traces_endpoint collect_detailed_traces")
_refused("`scheduling_policy` is fcfs or priority.", "scheduler_cls")
_refused(_OUT, "worker_cls", only=("auto",))
_refused(_OUT, "worker_extension_cls additional_config")
_refused("One engine computes prompts and answers; leave it out.", "ec_transfer_config kv_events_config")
_refused("Make a new LLM of the new checkpoint.", "weight_transfer_config")
_refused(
    "Keys and values are kept as they are, in FP8 without scales, or in int8 with scales of their own; leave it out.",
    switches="calculate_kv_scales",
)
_refused("Attention is computed in the type of `dtype`; leave it out.", "override_attention_dtype")
_refused("Name those that run in logits_processors; requests name none.", "logits_processor_pattern")
_refused("States are kept in float32.", "mamba_cache_dtype", only=("auto",))
_refused("States are kept in float32.", "mamba_ssm_cache_dtype", only=("auto", "float32"))
_refused("States are rounded to nearest; leave it out.", switches="enable_mamba_cache_stochastic_rounding")
# A server's flag of the same name.
_accepted("the server's flag says it; scripts get the whole text", "reasoning_parser")

_logged: set[str] = set()


def take(options: Mapping[str, Any], own: frozenset[str]) -> dict[str, Any]:
    """The options that are fields of EngineArgs; of vLLM's others each is logged once by name.

    Raises:
        ConfigError: one would have an effect that beheld does not offer.
    """
    left = {}
    for name, value in options.items():
        option = None if name in own else OPTIONS.get(name)
        if option is None:
            left[name] = value
        elif option.refuses(value):
            raise ConfigError(f"{name} is not available here.", option.remedy, param=name)
        elif option.why and value is not None and name not in _logged:
            _logged.add(name)
            logging.getLogger(__name__).info("%s changes nothing: %s.", name, option.why)
    return left
