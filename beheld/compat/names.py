"""The table of names: module path under `vllm` -> name -> the beheld object."""

from __future__ import annotations

from collections.abc import Mapping

_LLM = {"LLM": "beheld.api.llm:LLM"}
_ARGS = {
    "AsyncEngineArgs": "beheld.compat.engine_args:ScriptEngineArgs",
    "EngineArgs": "beheld.compat.engine_args:ScriptEngineArgs",
}
_LORA = {"LoRARequest": "beheld.core.request:LoRARequest"}
_PARAMS = {
    "PoolingParams": "beheld.core.params:PoolingParams",
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
_PARSER = {"FlexibleArgumentParser": "beheld.compat.arguments:FlexibleArgumentParser"}
_PORT = {"get_open_port": "beheld.compat.network:get_open_port"}
_PROMPTS = {
    "PromptType": "beheld.inputs.prompt.parse:PromptType",
    "TextPrompt": "beheld.compat.prompts:TextPrompt",
    "TokensPrompt": "beheld.compat.prompts:TokensPrompt",
}
_TEMPLATES = {"get_chat_template_fallback_path": "beheld.compat.templates:get_chat_template_fallback_path"}

MODULES: Mapping[str, Mapping[str, str]] = {
    "vllm": _LLM | _ARGS | _PARAMS | _OUTPUTS | _PROMPTS | {"__version__": "beheld:__version__"},
    "vllm.assets": {},
    "vllm.assets.audio": {"AudioAsset": "beheld.compat.assets:AudioAsset"},
    "vllm.assets.image": {"ImageAsset": "beheld.compat.assets:ImageAsset"},
    "vllm.assets.video": {"VideoAsset": "beheld.compat.assets:VideoAsset"},
    "vllm.config": _POOLER,
    "vllm.config.pooler": _POOLER,
    "vllm.engine": {},
    "vllm.engine.arg_utils": _ARGS,
    "vllm.entrypoints": {},
    "vllm.entrypoints.llm": _LLM,
    "vllm.inputs": _PROMPTS,
    "vllm.lora": {},
    "vllm.lora.request": _LORA,
    "vllm.model_executor": {},
    "vllm.model_executor.models": {},
    "vllm.model_executor.models.deepseek_ocr": {
        "NGramPerReqLogitsProcessor": "beheld.compat.ngram:NGramPerReqLogitsProcessor"
    },
    "vllm.multimodal": {},
    "vllm.multimodal.image": {"convert_image_mode": "beheld.compat.media:convert_image_mode"},
    "vllm.multimodal.utils": {
        "fetch_audio": "beheld.compat.media:fetch_audio",
        "fetch_image": "beheld.compat.media:fetch_image",
        "fetch_video": "beheld.compat.media:fetch_video",
    },
    "vllm.outputs": _OUTPUTS,
    "vllm.transformers_utils": {},
    "vllm.transformers_utils.chat_templates": _TEMPLATES,
    "vllm.transformers_utils.chat_templates.registry": _TEMPLATES,
    "vllm.sampling_params": {
        "SamplingParams": _PARAMS["SamplingParams"],
        "StructuredOutputsParams": "beheld.core.params:StructuredOutputs",
        "RepetitionDetectionParams": "beheld.core.repetition:RepetitionDetectionParams",
    },
    "vllm.pooling_params": {"PoolingParams": _PARAMS["PoolingParams"]},
    # Old and new homes of the parser and of the port.
    "vllm.utils": _PARSER | _PORT,
    "vllm.utils.argparse_utils": _PARSER,
    "vllm.utils.network_utils": _PORT,
}
