"""One-line descriptions of the engine options, for --help and the documentation."""

from __future__ import annotations

from beheld.platform.probe import device_words

# Field of EngineArgs -> (the default in words if the value is None, description).
FLAG_HELP: dict[str, tuple[str, str]] = {
    "tokenizer": ("the model's", "a folder or hub name of another tokenizer"),
    "tokenizer_mode": ("", "`auto`, `slow`, `hf` or `mistral`: all are transformers' own tokenizer"),
    "skip_tokenizer_init": ("", "no tokenizer: prompts and answers are token ids"),
    "task": (
        "",
        "the older form of `--runner` and `--convert`: `auto`, `generate`, `embed`, `classify`, `score` or `reward`",
    ),
    "runner": (
        "",
        "`generate` text, or make vectors or scores by `pooling`; `auto`: as the checkpoint says, see "
        "[embeddings](../how-to/embeddings.md)",
    ),
    "convert": ("", "with `--runner pooling`: `embed`, `classify` or `reward`; `auto`: as the checkpoint says"),
    "override_pooler_config": (
        "the checkpoint's",
        'JSON of how hidden states are pooled, for example `{"pooling_type": "MEAN", "normalize": true}`',
    ),
    "pooler_config": ("the checkpoint's", "the same as `--override-pooler-config`"),
    "profiler_config": (
        "none",
        'JSON of where `/stop_profile` writes, `{"profiler": "torch", "torch_profiler_dir": "traces"}`; else that of '
        "`BEHELD_PROFILES`",
    ),
    "trust_remote_code": ("", "run Python code that the checkpoint brings"),
    "revision": ("newest", "branch, tag or commit of a hub model"),
    "mmproj": ("the one next to it", "of a GGUF model, the file of its vision part; empty for none"),
    "tokenizer_revision": ("newest", "the same for the tokenizer"),
    "download_dir": ("the hub's cache", "where hub models are kept"),
    "hf_token": (
        "the one of the hub's tools",
        "key for the hub; without a value, or with `true`, the one that was stored",
    ),
    "hf_overrides": ("none", "JSON of fields of config.json to change"),
    "config_format": ("", "`auto` reads params.json where there is no config.json; `hf` never, `mistral` always"),
    "load_format": (
        "",
        "`auto`, `hf`, `safetensors`, `sharded_state` (the same: parts go by their names), `mistral` for"
        " consolidated.safetensors, or `dummy` for random weights",
    ),
    "generation_config": ("", "`auto`: the checkpoint's recommended sampling; `vllm`: none"),
    "override_generation_config": ("none", "JSON of default sampling parameters"),
    "dtype": ("", "`auto`, `float32`, `bfloat16` or `float16`: type of weights and activations"),
    "quantization": (
        "the checkpoint's",
        "`int8`, `int4`, `nf4` or `fp8` rounds weights at load, on a CPU (`int4` and `fp8` also on a GPU); others "
        "must be the checkpoint's",
    ),
    "kv_cache_dtype": (
        "",
        "`auto`: that of `--dtype`; `fp8`: e4m3, without scales; `int8`: a scale by position and head, on a CPU",
    ),
    "seed": ("random", "seed of requests that set none"),
    "max_logprobs": ("", "most candidates that a request may ask for at each token; -1 for the whole vocabulary"),
    "logprobs_mode": (
        "",
        "what log-probabilities are: `raw_logprobs`, `processed_logprobs` (after penalties, temperature and filters), "
        "`raw_logits` or `processed_logits`, see [several answers](../how-to/several-answers.md)",
    ),
    "max_model_len": ("the model's, as memory allows", "tokens of prompt and answer together, at which answers end"),
    "max_num_seqs": ("64 on a CPU, else 256; 1024 for a small model that pools", "sequences computed at once"),
    "max_num_batched_tokens": (
        "2048 on a CPU, else 8192; 32768 for a small model that pools",
        "tokens computed in one step",
    ),
    "enable_chunked_prefill": ("on", "long prompts are computed in several steps"),
    "enable_prefix_caching": ("on", "what prompts have in common is computed once"),
    "kv_transfer_config": (
        "none",
        "JSON that names a folder in which engines keep what they computed of prompts, see "
        "[keep prefixes](../how-to/keep-prefixes.md)",
    ),
    "scheduling_policy": ("", "`fcfs`: first come, first served; `priority`: by the requests' `priority`"),
    "async_scheduling": ("on with a GPU or stages", "the next step is planned while the device computes"),
    "block_size": ("16", "positions in one block of the KV cache"),
    "num_gpu_blocks_override": ("as memory allows", "how many blocks there are"),
    "gpu_memory_utilization": (
        "",
        "fraction of the GPU's whole memory that this engine may use",
    ),
    "kv_cache_memory_bytes": ("what is left", "bytes of the KV cache"),
    "swap_space": ("none", "known for old scripts; changes nothing"),
    "cpu_offload_gb": ("0", "weights kept off the device; all but 0 is refused"),
    "enable_sleep_mode": ("", "changes nothing: every engine can sleep, see [Sleep](../how-to/sleep.md)"),
    "device": ("", f"`auto`, {device_words()}"),
    "attention_backend": ("the fastest that fits", "name of another one"),
    "enforce_eager": ("", "no CUDA graphs and no compiled layers"),
    "tensor_parallel_size": ("", "GPUs that share one model; if there are fewer, it runs on one that holds it"),
    "pipeline_parallel_size": ("", "stages of layers, each on GPUs of its own; together with tensor_parallel_size"),
    "data_parallel_size": (
        "",
        "engines that share out the requests, each on its own GPUs: [several engines](../how-to/several-engines.md)",
    ),
    "data_parallel_backend": ("", "`mp` starts these engines on this host, `ray` on those of a cluster"),
    "enable_expert_parallel": ("", "GPUs that share one model share experts out whole, not a part of each"),
    "distributed_executor_backend": (
        "none",
        "`mp` splits a model on a CPU too, `uni` never; `ray` on [several hosts](../how-to/several-hosts.md); "
        "`external_launcher`: torchrun has started the processes",
    ),
    "mm_encoder_tp_mode": (
        "",
        "of several ranks: `weights`, all share the towers' layers; `data`, each encodes its share of media",
    ),
    "disable_custom_all_reduce": ("", "known for old scripts; changes nothing"),
    "enable_lora": ("", "requests may name LoRA adapters"),
    "max_loras": ("", "different adapters in one step"),
    "max_lora_rank": ("", "greatest rank of an adapter"),
    "max_cpu_loras": ("as many as are named", "adapters kept in memory"),
    "limit_mm_per_prompt": (
        "999 of each",
        'most items of a request, as `{"image": 4, "video": 1}`; towers of kinds with 0 are not loaded',
    ),
    "language_model_only": (
        "",
        "the same with 0 of each, whatever `limit_mm_per_prompt` says: the model takes texts alone",
    ),
    "logits_processors": (
        "none",
        "classes or functions as `module:name`, which change the logits of all requests; `vllm_xargs` of a request "
        "reaches classes, in which `import vllm` gives beheld. `serve` and `batch` also load those of installed "
        "packages (entry points of `vllm.logits_processors`). They keep the engine in a thread",
    ),
    "mm_processor_kwargs": ("none", "JSON of options of the model's processor, for all requests"),
    "media_io_kwargs": ("none", 'how media are read, as `{"video": {"num_frames": 16}}`'),
    "mm_processor_cache_gb": ("1 on a CPU, else 4", "GiB of processed media that are kept"),
    "disable_mm_preprocessor_cache": ("", "keep none"),
    "enable_mm_embeds": ("", "requests may bring embeddings in place of media"),
    "enable_prompt_embeds": ("", "prompts may be embeddings, with models of text"),
    "encoder_urls": ("none", "addresses of `beheld encode-serve`, whose towers encode media; one or several"),
    "mm_encoder_budget": ("as a step or the model's length", "embeddings kept on the device, in tokens"),
    "media_workers": ("1 on a CPU, else by cores", "processes that decode media; 0 decodes in the server's process"),
    "media_work": (
        "",
        "`decode`: only that; `process`: they run the processor too; `auto`: the latter with a GPU, and for images of "
        "more than 67 megapixels",
    ),
    "media_limits": (
        "see below",
        'JSON of bounds on media, as `{"max_pixels": 4000000, "max_audio_s": 60}`',
    ),
    "strict_media": ("", "refuse what would be cut, resampled or dropped of media"),
    "allowed_local_media_path": ("none", "a folder whose files requests may show"),
    "allowed_media_domains": ("any", "the only hosts that media are fetched from; one or several"),
    "chat_template": ("the checkpoint's", "a Jinja template, or a file of one"),
    "chat_template_content_format": ("", "`auto`, `openai` (lists of parts) or `string`"),
    "served_model_name": ("the model's", "names in requests, one or several; answers show the first"),
    "disable_log_stats": ("", "known for old scripts; changes nothing"),
    "use_tqdm_on_load": ("", "bars while the model is loaded"),
}
