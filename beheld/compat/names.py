"""The table of names: module path under `vllm` -> name -> the beheld object."""

from __future__ import annotations

from collections.abc import Mapping

_LLM = {"LLM": "beheld.compat.llm:ScriptLLM"}
_ENGINE = {"LLMEngine": "beheld.compat.llm:ScriptEngine"}
_ASYNC_ENGINE = {"AsyncLLMEngine": "beheld.compat.async_engine:ScriptAsyncLLM"}
_REGISTRY = {"ModelRegistry": "beheld.compat.registry:ModelRegistry"}
_ARGS = {
    "AsyncEngineArgs": "beheld.compat.engine_args:ScriptEngineArgs",
    "EngineArgs": "beheld.compat.engine_args:ScriptEngineArgs",
}
_LORA = {"LoRARequest": "beheld.core.request:LoRARequest"}
_PARAMS = {
    "PoolingParams": "beheld.core.pooling_params:PoolingParams",
    "SamplingParams": "beheld.core.params:SamplingParams",
}
_OUTPUTS = {
    **{
        name: f"beheld.core.outputs:{name}"
        for name in (
            *("ClassificationOutput", "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput"),
            *("EmbeddingRequestOutput", "PoolingOutput", "PoolingRequestOutput", "ScoringOutput"),
            "ScoringRequestOutput",
        )
    },
    "RequestOutput": "beheld.core.outputs:RequestOutput",
}
_POOLER = {"PoolerConfig": "beheld.core.pooling:PoolerConfig"}
_KV_TRANSFER = {"KVTransferConfig": "beheld.core.kv_transfer:KVTransferConfig"}
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_CONFIG = {
    "StructuredOutputsConfig": "beheld.compat.grammars:StructuredOutputsConfig",
    "ProfilerConfig": "beheld.core.profiling:ProfilerConfig",
    "VllmConfig": "beheld.core.config:EngineConfig",
}
_LOGITS = {
    name: f"beheld.compat.logits:{name}"
    for name in (
        *("AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"),
        "RequestLogitsProcessor",
    )
}
_PARSERS = {
    name: f"beheld.compat.parsers:{name}"
    for name in (
        *("DeltaFunctionCall", "DeltaMessage", "DeltaToolCall", "ExtractedToolCallInformation", "FunctionCall"),
        *("ChatCompletionRequest", "ChatCompletionToolsParam", "FunctionDefinition"),
    )
} | {
    "ToolCall": "beheld.compat.parsers:ReadCall",
    "ResponsesRequest": "beheld.compat.parsers:ParsedResponsesRequest",
}
_TOOL_PARSERS = {
    "ToolParser": "beheld.compat.parsers:ToolParser",
    "ToolParserManager": "beheld.compat.parsers:TOOL_PARSERS",
}
_REASONING_PARSERS = {
    "ReasoningParser": "beheld.compat.parsers:ReasoningParser",
    "ReasoningParserManager": "beheld.compat.parsers:REASONING_PARSERS",
}
_THINKING = {"BaseThinkingReasoningParser": "beheld.compat.parsers:MarkedReasoningParser"}
_METRICS = {name: f"beheld.compat.metrics:{name}" for name in ("Counter", "Gauge", "Histogram", "Metric", "Vector")}
_BEAMS = {name: f"beheld.core.beams:{name}" for name in ("BeamSearchOutput", "BeamSearchSequence")}
_PARSER = {"FlexibleArgumentParser": "beheld.compat.arguments:FlexibleArgumentParser"}
_PORT = {name: f"beheld.compat.network:{name}" for name in ("get_ip", "get_open_port", "get_open_ports_list")}
_PROMPTS = {
    "PromptType": "beheld.inputs.prompt.parse:PromptType",
    "TextPrompt": "beheld.compat.prompts:TextPrompt",
    "TokensPrompt": "beheld.compat.prompts:TokensPrompt",
}
_PROMPT_PARTS = {
    name: f"beheld.compat.prompts:{name}"
    for name in (
        *("EmbedsPrompt", "ExplicitEncoderDecoderPrompt", "ModalityData", "MultiModalDataBuiltins"),
        *("MultiModalDataDict", "MultiModalUUIDDict", "SingletonPrompt"),
    )
}
_UUID = {"random_uuid": "beheld.compat.network:random_uuid"}
_TEMPLATES = {"get_chat_template_fallback_path": "beheld.compat.templates:get_chat_template_fallback_path"}

_TEMPLATE_FILE = {"load_chat_template": "beheld.compat.templates:load_chat_template"}

# Modules that `python -m` runs -> the words of the command that does the same.
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "vllm.entrypoints.cli.main": (),
    "vllm.entrypoints.launchers.api_server.entry": ("serve",),
    "vllm.entrypoints.launchers.run_batch": ("run-batch",),
    "vllm.entrypoints.openai.api_server": ("serve",),
    "vllm.entrypoints.openai.run_batch": ("run-batch",),
}

MODULES: Mapping[str, Mapping[str, str]] = {
    "vllm": _LLM
    | _ENGINE
    | _ASYNC_ENGINE
    | _ARGS
    | _PARAMS
    | _OUTPUTS
    | _PROMPTS
    | _REGISTRY
    | {"__version__": "beheld:__version__"},
    "vllm.assets": {},
    "vllm.assets.audio": {"AudioAsset": "beheld.compat.assets:AudioAsset"},
    "vllm.assets.image": {"ImageAsset": "beheld.compat.assets:ImageAsset"},
    "vllm.assets.video": {
        name: f"beheld.compat.assets:{name}"
        for name in ("VideoAsset", "video_get_metadata", "video_to_ndarrays", "video_to_pil_images_list")
    },
    "vllm.beam_search": _BEAMS,
    "vllm.benchmarks": {},
    "vllm.benchmarks.datasets": {
        name: f"beheld.compat.datasets:{name}" for name in ("SampleRequest", "add_dataset_parser", "get_samples")
    },
    "vllm.config": _POOLER | _CONFIG | _KV_TRANSFER,
    "vllm.config.kv_transfer": _KV_TRANSFER,
    "vllm.config.pooler": _POOLER,
    "vllm.distributed": {
        "cleanup_dist_env_and_memory": "beheld.compat.processes:cleanup_dist_env_and_memory",
    },
    "vllm.distributed.kv_transfer": {},
    "vllm.distributed.kv_transfer.kv_connector": {},
    _CONNECTOR: {},
    f"{_CONNECTOR}.base": {
        name: f"beheld.kvstore.connector:{name}" for name in ("KVConnectorMetadata", "KVConnectorRole")
    },
    **{
        f"{_CONNECTOR}.{module}": {
            name: "beheld.kvstore.connector:SharedStorageConnector",
            f"{name}Metadata": "beheld.kvstore.connector:SharedStorageConnectorMetadata",
        }
        for module, name in (
            ("shared_storage_connector", "SharedStorageConnector"),
            ("example_connector", "ExampleConnector"),
        )
    },
    "vllm.engine": {},
    "vllm.forward_context": {"ForwardContext": "beheld.kvstore.connector:PassFacts"},
    "vllm.v1.core": {},
    "vllm.v1.core.kv_cache_manager": {"KVCacheBlocks": "beheld.kvstore.connector:KVCacheBlocks"},
    "vllm.v1.request": {"Request": "beheld.kvstore.connector:StoredRequest"},
    "vllm.engine.async_llm_engine": _ASYNC_ENGINE,
    "vllm.engine.llm_engine": _ENGINE,
    "vllm.engine.arg_utils": _ARGS,
    "vllm.entrypoints": {},
    "vllm.entrypoints.chat_utils": _TEMPLATE_FILE,
    # What the command of a vllm in the same environment calls.
    "vllm.entrypoints.cli": {},
    "vllm.entrypoints.cli.main": {"main": "beheld.cli.main:command"},
    "vllm.entrypoints.llm": _LLM,
    "vllm.entrypoints.pooling": {},
    "vllm.entrypoints.pooling.utils": {
        name: f"beheld.compat.serial:{name}"
        for name in ("MetadataItem", "build_metadata_items", "decode_pooling_output")
    },
    "vllm.entrypoints.score_utils": {"ScoreMultiModalParam": "beheld.compat.prompts:ScoreMultiModalParam"},
    "vllm.exceptions": {"VLLMValidationError": "beheld.core.errors:UserError"},
    "vllm.inputs": _PROMPTS | _PROMPT_PARTS,
    "vllm.logger": {"init_logger": "beheld.compat.processes:init_logger"},
    "vllm.logprobs": {
        "Logprob": "beheld.core.outputs:Logprob",
        "FlatLogprobs": "beheld.core.flat_logprobs:FlatLogprobs",
    },
    "vllm.lora": {},
    "vllm.lora.request": _LORA,
    "vllm.model_executor": {},
    "vllm.model_executor.model_loader": {"ShardedStateLoader": "beheld.compat.parts:ShardedStateLoader"},
    "vllm.model_executor.models": _REGISTRY,
    "vllm.model_executor.models.registry": _REGISTRY,
    "vllm.model_executor.models.deepseek_ocr": {
        "NGramPerReqLogitsProcessor": "beheld.compat.ngram:NGramPerReqLogitsProcessor"
    },
    "vllm.multimodal": {},
    "vllm.multimodal.image": {
        "convert_image_mode": "beheld.compat.media:convert_image_mode",
        "rgba_to_rgb": "beheld.compat.encoding:rgba_to_rgb",
        "rescale_image_size": "beheld.compat.encoding:rescale_image_size",
    },
    "vllm.multimodal.media": {"MediaConnector": "beheld.compat.connector:MediaConnector"},
    "vllm.multimodal.media.connector": {"MediaConnector": "beheld.compat.connector:MediaConnector"},
    "vllm.multimodal.media.audio": {"load_audio": "beheld.compat.media:load_audio"},
    "vllm.multimodal.utils": {
        "MediaConnector": "beheld.compat.connector:MediaConnector",
        "fetch_audio": "beheld.compat.media:fetch_audio",
        "fetch_image": "beheld.compat.media:fetch_image",
        "fetch_video": "beheld.compat.media:fetch_video",
        "encode_audio_base64": "beheld.compat.encoding:encode_audio_base64",
        "encode_audio_url": "beheld.compat.encoding:encode_audio_url",
        "encode_image_base64": "beheld.compat.encoding:encode_image_base64",
        "encode_image_url": "beheld.compat.encoding:encode_image_url",
        "encode_video_base64": "beheld.compat.encoding:encode_video_base64",
        "encode_video_url": "beheld.compat.encoding:encode_video_url",
    },
    "vllm.outputs": _OUTPUTS,
    "vllm.platforms": {"current_platform": "beheld.compat.processes:current_platform"},
    "vllm.transformers_utils": {},
    "vllm.transformers_utils.repo_utils": {"hf_api": "huggingface_hub:HfApi"},
    "vllm.transformers_utils.chat_templates": _TEMPLATES,
    "vllm.transformers_utils.chat_templates.registry": _TEMPLATES,
    "vllm.renderers": {},
    "vllm.renderers.chat_utils": _TEMPLATE_FILE,
    "vllm.sampling_params": {
        "BeamSearchParams": "beheld.core.beams:BeamSearchParams",
        "GuidedDecodingParams": "beheld.compat.grammars:GuidedDecodingParams",
        "RequestOutputKind": "beheld.core.params:RequestOutputKind",
        "SamplingParams": _PARAMS["SamplingParams"],
        "StructuredOutputsParams": "beheld.compat.grammars:StructuredOutputsParams",
        "RepetitionDetectionParams": "beheld.core.repetition:RepetitionDetectionParams",
    },
    "vllm.pooling_params": {"PoolingParams": _PARAMS["PoolingParams"]},
    # Old and new homes of the parser and of the port.
    "vllm.utils": _PARSER | _PORT | _UUID,
    "vllm.utils.argparse_utils": _PARSER,
    "vllm.utils.uuid_utils": _UUID,
    "vllm.utils.network_utils": _PORT,
    "vllm.utils.print_utils": {"print_embeddings": "beheld.compat.processes:print_embeddings"},
    "vllm.utils.serial_utils": {
        name: f"beheld.compat.serial:{name}"
        for name in (
            *("EMBED_DTYPES", "EMBED_DTYPE_TO_TORCH_DTYPE", "ENDIANNESS", "MetadataItem", "binary2tensor"),
            *("decode_pooling_output", "tensor2base64", "tensor2binary"),
        )
    },
    "vllm.version": {"__version__": "beheld:__version__"},
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.exceptions": {
        "EngineDeadError": "beheld.core.errors:EngineDeadError",
        "EngineGenerateError": "beheld.core.errors:EngineError",
    },
    "vllm.v1.engine.async_llm": {"AsyncLLM": "beheld.compat.async_engine:ScriptAsyncLLM"},
    "vllm.v1.engine.llm_engine": _ENGINE,
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.ray_wrappers": {"RayPrometheusStatLogger": "beheld.compat.metrics:RayPrometheusStatLogger"},
    "vllm.v1.metrics.reader": _METRICS,
    "vllm.v1.sample": {},
    "vllm.v1.sample.logits_processor": _LOGITS,
    **dict.fromkeys(
        (
            *("vllm.tool_parsers", "vllm.tool_parsers.abstract_tool_parser"),
            *(
                "vllm.entrypoints.openai.tool_parsers",
                "vllm.entrypoints.openai.tool_parsers.abstract_tool_parser",
            ),
        ),
        _TOOL_PARSERS,
    ),
    "vllm.reasoning": _REASONING_PARSERS,
    "vllm.reasoning.abs_reasoning_parsers": _REASONING_PARSERS,
    "vllm.reasoning.basic_parsers": _THINKING,
    "vllm.reasoning.deepseek_r1_reasoning_parser": {
        "DeepSeekR1ReasoningParser": "beheld.compat.parsers:DeepSeekR1ReasoningParser"
    },
    "vllm.reasoning.qwen3_reasoning_parser": {"Qwen3ReasoningParser": "beheld.compat.parsers:Qwen3ReasoningParser"},
    **{
        name: {}
        for name in (
            *("vllm.entrypoints.generate", "vllm.entrypoints.generate.base", "vllm.entrypoints.openai"),
            *("vllm.entrypoints.openai.engine", "vllm.entrypoints.openai.chat_completion"),
            *("vllm.entrypoints.openai.responses", "vllm.entrypoints.openai.api_server"),
            *("vllm.entrypoints.openai.run_batch", "vllm.entrypoints.launchers"),
            *("vllm.entrypoints.launchers.api_server", "vllm.entrypoints.launchers.api_server.entry"),
            "vllm.entrypoints.launchers.run_batch",
        )
    },
    **dict.fromkeys(
        (
            *("vllm.entrypoints.openai.protocol", "vllm.entrypoints.openai.engine.protocol"),
            *(
                "vllm.entrypoints.openai.chat_completion.protocol",
                "vllm.entrypoints.openai.responses.protocol",
            ),
            "vllm.entrypoints.generate.base.protocol",
        ),
        _PARSERS,
    ),
    "vllm.tokenizers": {"TokenizerLike": "typing:Any"},
    "vllm.transformers_utils.tokenizer": {"AnyTokenizer": "typing:Any"},
    "vllm.v1.sample.logits_processor.builtin": {
        "process_dict_updates": "beheld.compat.logits:process_dict_updates",
    },
}

_ONE_ENGINE = "Caches go from engine to engine through a shared folder: kv_connector='ExampleConnector'."
_SAME_WEIGHTS = "Weights do not change while an engine runs; a new LLM reads new ones."
_OWN_BATCHES = (
    "Parts of vLLM's own steps on a GPU are not built; a logits processor written for them runs as a class of "
    "vllm.v1.sample.logits_processor."
)
_SERVER = "The parts of vLLM's server are not built; `beheld serve` is the server."
_PROCESSES = "Scripts do not reach into the engine's processes."
ABSENT: Mapping[str, str] = {
    "vllm.benchmarks.serve": "`beheld bench` measures a server.",
    "vllm.config.WeightTransferConfig": _SAME_WEIGHTS,
    "vllm.distributed.device_communicators": _SAME_WEIGHTS,
    "vllm.distributed.kv_events": "Events of the cache are not published.",
    "vllm.distributed.kv_transfer": _ONE_ENGINE,
    "vllm.distributed.parallel_state": _PROCESSES,
    "vllm.distributed.utils": _SAME_WEIGHTS,
    "vllm.distributed.weight_transfer": _SAME_WEIGHTS,
    "vllm.entrypoints.launchers.launcher": _SERVER,
    "vllm.entrypoints.serve": _SERVER,
    "vllm.envs": "Variables are read by beheld itself: docs/reference/environment.md lists them.",
    "vllm.forward_context": _PROCESSES,
    "vllm.model_executor.model_loader.utils": _SAME_WEIGHTS,
    "vllm.model_executor.model_loader.tensorizer": "Weights are read from safetensors.",
    "vllm.pooling_params.LateChunkingParams": (
        "/v1/embeddings chunks late; in a script, a chunk's vector is the mean of its tokens', which LLM.encode gives."
    ),
    "vllm.utils.gpu_sync_debug": _OWN_BATCHES,
    "vllm.utils.torch_utils": _OWN_BATCHES,
    "vllm.v1.core": _PROCESSES,
    "vllm.v1.kv_cache_interface": _PROCESSES,
    "vllm.v1.metrics.loggers": "Loggers of a script's own are not called: /metrics and LLM.get_metrics have figures.",
    "vllm.v1.request": _PROCESSES,
    "vllm.v1.watermarking": "Texts are not marked.",
    "vllm.v1.worker": "vllm.v1.sample.logits_processor.LogitsProcessor changes logits.",
}
"""Dotted names that beheld does not have, with all below them: why, or what there is instead."""
