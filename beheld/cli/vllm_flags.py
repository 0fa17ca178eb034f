"""Flags of vLLM's server that beheld does not have: which are accepted without effect, and which are refused."""

from __future__ import annotations

import json
from typing import Any

from beheld.core.errors import ConfigError
from beheld.core.vllm_options import OPTIONS, VllmOption
from beheld.utils.log import get_logger

_LIBRARY = "llguidance compiles all grammars"
_LOG = "the log has one line for each request, without its content; BEHELD_LOG_LEVEL=WARNING leaves it out"
_PROXY = "Let the proxy before the server do it."

FLAGS: dict[str, VllmOption] = {
    # Harmless.
    "guided-decoding-backend": VllmOption(_LIBRARY, values=1),
    "guided-decoding-disable-fallback": VllmOption(_LIBRARY),
    "disable-log-requests": VllmOption(_LOG),
    "max-log-len": VllmOption(_LOG, values=1),
    "disable-uvicorn-access-log": VllmOption("the request log is the only access log"),
    "uvicorn-log-level": VllmOption("BEHELD_LOG_LEVEL says what is logged", values=1),
    "response-role": VllmOption(
        "answers have that role", "Answers have the role assistant; leave it out.", values=1, only=("assistant",)
    ),
    "enable-reasoning": VllmOption("--reasoning-parser says it"),
    "enable-prompt-tokens-details": VllmOption("usage always has them"),
    "exclude-tools-when-tool-choice-none": VllmOption("that is so here"),
    "disable-access-log-for-endpoints": VllmOption(_LOG, values=1),
    "enable-offline-docs": VllmOption("/docs needs no other server"),
    "enable-log-deltas": VllmOption("what models say is never logged"),
    "log-error-stack": VllmOption("the log has the stack of each error of the server's own"),
    "h11-max-incomplete-event-size": VllmOption("headers have limits of this server's", values=1),
    "h11-max-header-count": VllmOption("headers have limits of this server's", values=1),
    "use-v2-block-manager": VllmOption("there is one only"),
    "num-scheduler-steps": VllmOption("--async-scheduling plans ahead", values=1),
    "max-seq-len-to-capture": VllmOption("graphs' sizes follow from --max-num-seqs", values=1),
    "tokenizer-pool-size": VllmOption("texts are tokenized in threads", values=1),
    "speculative-model": VllmOption("no token is guessed ahead, and answers are the same without", values=1),
    "enable-flash-late-interaction": VllmOption("one way of late interaction is there, and scores are the same"),
    # Refused.
    "disable-frontend-multiprocessing": VllmOption(remedy="Use --engine thread."),
    "rope-scaling": VllmOption(remedy="Use --hf-overrides '{\"rope_scaling\": ...}'.", values=1),
    "rope-theta": VllmOption(remedy="Use --hf-overrides '{\"rope_theta\": ...}'.", values=1),
    "enable-server-load-tracking": VllmOption("/load always tells how many answers are in work"),
    "enable-log-outputs": VllmOption(remedy="Leave it out: what models say is never logged."),
    "enable-scale-out": VllmOption("one server renders, answers and reads"),
    "sse-keep-alive-interval": VllmOption(
        "streams have no comments", "Leave it out; a stream that was cut can be taken up again.", values=1, only=("0",)
    ),
    "tool-server": VllmOption(remedy="Clients run their tools; leave it out.", values=1),
    "tool-strict-level": VllmOption(remedy='Functions say "strict": true.', values=1),
    "reasoning-effort-map": VllmOption(remedy="Use --default-chat-template-kwargs.", values=1),
    "fingerprint-mode": VllmOption(remedy="Leave it out; answers have no system_fingerprint.", values=1),
    "fingerprint-value": VllmOption(remedy="Leave it out; answers have no system_fingerprint.", values=1),
    "grpc-port": VllmOption(remedy="Clients speak HTTP; leave it out.", values=1),
    "enable-ssl-refresh": VllmOption(remedy="Restart the server after its certificate has changed."),
    "middleware": VllmOption(remedy=_PROXY, values=1),
    "cohere-format": VllmOption(remedy="Cohere's clients embed, rank and chat with /v2/chat here.", values=1),
    "cohere-is-reasoning-model": VllmOption("--reasoning-parser says it, and reasoning has blocks of its own"),
    "anthropic-disabled-thinking-effort": VllmOption(
        remedy="Leave it out: /v1/messages switches the template's thinking off where a request asks for that.",
        values=1,
    ),
    **{
        name: VllmOption(remedy="One process serves all engines; leave it out.", values=1)
        for name in (
            *("data-parallel-supervisor-port", "dp-supervisor-probe-interval-s", "dp-supervisor-probe-timeout-s"),
            "dp-supervisor-probe-failure-threshold",
        )
    },
}

# Options of the engine; the server has flags of its own for two, and vLLM keeps two to itself.
_OWN = frozenset({"reasoning_parser", "reasoning_parser_plugin"})
FLAGS.update(
    {
        name.replace("_", "-"): option
        for name, option in OPTIONS.items()
        if name not in _OWN and not name.startswith("_")
    }
)

# Other spellings of these; a digit may follow -O.
SHORT = {
    "-sc": "speculative-config",
    "-cc": "compilation-config",
    "-O": "compilation-config",
}

# By flag: vLLM's name of a parser -> beheld's parser of the same format.
SAME: dict[str, dict[str, str]] = {
    "reasoning-parser": dict.fromkeys(
        (
            *("deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "glm45", "glm47", "granite_thinking_parser"),
            *("holo2", "hy_v3", "kimi_k2", "ling3", "mimo", "minicpmv", "minimax_m2", "nemotron_v3", "poolside_v1"),
            *("qwen3", "step3", "step5"),
        ),
        "think",
    )
    | {
        "openai_gptoss": "openai",
        "cohere_command3": "cohere",
        "cohere_command4": "cohere",
        "musespark1x": "muse",
    },
    "tool-call-parser": {
        "llama4_json": "llama3_json",
        "qwen3_xml": "qwen3_coder",
        "glm47": "glm45",
        "deepseek_v31": "deepseek_v3",
        "ernie45": "hermes",
        "llama4_pythonic": "pythonic",
        "qwen3_json": "hermes",
        "step3p5": "qwen3_coder",
        "step5": "qwen3_coder",
        "mimo": "qwen3_coder",
        "minimax": "jamba",
        "cohere_command3": "cohere",
        "cohere_command4": "cohere",
        "ling3": "glm45",
        "poolside_v1": "glm45",
        "muse_glimmer": "muse",
        "musespark1x": "muse",
    },
}


def answer(name: str, value: str | None) -> int | None:
    """Log why a flag has no effect and return how many following words it uses; None for an unknown flag.

    Args:
        name: the flag without leading dashes, words joined by dashes; or one of SHORT.
        value: the flag's value, or the next word.

    Raises:
        ConfigError: the flag would have an effect that beheld does not offer.
    """
    digits = name[len(name.rstrip("0123456789")) :]
    attached = bool(digits) and name.removesuffix(digits) in SHORT
    name = SHORT.get(name.removesuffix(digits), name) if digits else SHORT.get(name, name)
    value = digits if attached else value
    known = FLAGS.get(name)
    if known is None:
        # `--no-X` is what beheld does, for a switch that it has not.
        positive = FLAGS.get(name.removeprefix("no-"))
        return 0 if name.startswith("no-") and positive is not None and not positive.values else None
    if known.why and known.values and value is None:
        raise ConfigError(f"--{name} needs a value.", known.remedy or "Leave it out.", param=name.replace("-", "_"))
    if known.unread or known.fields:
        refused = value is None or known.refuses(value)
    else:
        refused = value not in known.only and _read(value) not in known.only if known.only else not known.why
    if refused:
        raise ConfigError(f"--{name} is not available here.", known.remedy, param=name.replace("-", "_"))
    if not known.why:
        return known.values
    _log("--%s changes nothing: %s.", name, known.why)
    return 0 if attached else known.values


def _read(value: str | None) -> Any:
    """A value of JSON, however it is written; else itself."""
    try:
        return json.loads(value or "")
    except ValueError:
        return value


def same(flag: str, value: str) -> str:
    """Translate a value to beheld's name, and log it if the name differs."""
    own = SAME.get(flag, {}).get(value)
    if own is None:
        return value
    _log("--%s %s is %s here.", flag, value, own)
    return own


def _log(message: str, *words: str) -> None:
    # Created late: the first logger reads the level, which commands set before this.
    get_logger(__name__).info(message, *words)
