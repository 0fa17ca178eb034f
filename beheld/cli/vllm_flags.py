"""Flags of vLLM's server that beheld does not have: which are accepted without effect, and which are refused."""

from __future__ import annotations

from dataclasses import dataclass

from beheld.core.errors import ConfigError
from beheld.utils.log import get_logger


@dataclass(frozen=True)
class VllmFlag:
    """One flag of vLLM's server.

    Attributes:
        why: why it has no effect, for the log and the documentation; "" if it is refused.
        remedy: what to do instead, if it is refused.
        values: how many words belong to it.
        only: the values without effect; others are refused. Empty: any.
    """

    why: str = ""
    remedy: str = ""
    values: int = 0
    only: tuple[str, ...] = ()


_LIBRARY = "llguidance compiles all grammars"
_LOG = "the log has one line for each request, without its content; BEHELD_LOG_LEVEL=WARNING leaves it out"
_TLS = "Put a proxy that speaks TLS before the server."
_CORS = "The page comes from the same address; for others, let a proxy add the headers."
_PROXY = "Let the proxy before the server do it."

FLAGS: dict[str, VllmFlag] = {
    # Harmless.
    "guided-decoding-backend": VllmFlag(_LIBRARY, values=1),
    "guided-decoding-disable-fallback": VllmFlag(_LIBRARY),
    "disable-log-requests": VllmFlag(_LOG),
    "enable-log-requests": VllmFlag(_LOG),
    "no-enable-log-requests": VllmFlag(_LOG),
    "max-log-len": VllmFlag(_LOG, values=1),
    "disable-uvicorn-access-log": VllmFlag("the request log is the only access log"),
    "uvicorn-log-level": VllmFlag("BEHELD_LOG_LEVEL says what is logged", values=1),
    "response-role": VllmFlag(
        "answers have that role", "Answers have the role assistant; leave it out.", values=1, only=("assistant",)
    ),
    "root-path": VllmFlag("routes begin there", f"Routes begin at /. {_PROXY}", values=1, only=("/", "")),
    "enable-reasoning": VllmFlag("--reasoning-parser says it"),
    "enable-prompt-tokens-details": VllmFlag("usage always has them"),
    "enable-request-id-headers": VllmFlag("every answer has an X-Request-Id"),
    "exclude-tools-when-tool-choice-none": VllmFlag("that is so here"),
    "interleave-mm-strings": VllmFlag("items always stand where they were written"),
    "use-v2-block-manager": VllmFlag("there is one only"),
    "num-scheduler-steps": VllmFlag("--async-scheduling plans ahead", values=1),
    "max-seq-len-to-capture": VllmFlag("graphs' sizes follow from --max-num-seqs", values=1),
    "max-parallel-loading-workers": VllmFlag("weights are read by one process", values=1),
    "mm-processor-cache-type": VllmFlag("there is one kind of it", values=1),
    "prefix-caching-hash-algo": VllmFlag("blocks are known by whole digests", values=1),
    "tokenizer-pool-size": VllmFlag("texts are tokenized in threads", values=1),
    # Refused.
    "disable-frontend-multiprocessing": VllmFlag(remedy="Use --engine thread."),
    "api-server-count": VllmFlag(remedy="One process serves; leave it out.", values=1),
    "structured-outputs-config": VllmFlag(remedy=f"Leave it out: {_LIBRARY}.", values=1),
    "speculative-config": VllmFlag(remedy="Nothing is guessed ahead in this version; leave it out.", values=1),
    "speculative-model": VllmFlag(remedy="Nothing is guessed ahead in this version; leave it out.", values=1),
    "compilation-config": VllmFlag(remedy="Leave it out; --enforce-eager switches graphs and compiling off.", values=1),
    "rope-scaling": VllmFlag(remedy="Use --hf-overrides '{\"rope_scaling\": ...}'.", values=1),
    "rope-theta": VllmFlag(remedy="Use --hf-overrides '{\"rope_theta\": ...}'.", values=1),
    "code-revision": VllmFlag(remedy="--revision is that of the code too.", values=1),
    "tool-parser-plugin": VllmFlag(remedy="Use --tool-call-parser with one of the forms that it lists.", values=1),
    "enable-force-include-usage": VllmFlag(remedy="Clients ask with stream_options.include_usage."),
    "enable-server-load-tracking": VllmFlag(remedy="Leave it out; /metrics tells of the load."),
    "default-chat-template-kwargs": VllmFlag(remedy="Requests say it in chat_template_kwargs.", values=1),
    "return-tokens-as-token-ids": VllmFlag(remedy="Leave it out; logprobs have the bytes of each token."),
    "enable-log-outputs": VllmFlag(remedy="Leave it out: what models say is never logged."),
    "middleware": VllmFlag(remedy=_PROXY, values=1),
    "ssl-keyfile": VllmFlag(remedy=_TLS, values=1),
    "ssl-certfile": VllmFlag(remedy=_TLS, values=1),
    "ssl-ca-certs": VllmFlag(remedy=_TLS, values=1),
    "ssl-cert-reqs": VllmFlag(remedy=_TLS, values=1),
    "allowed-origins": VllmFlag(remedy=_CORS, values=1),
    "allowed-methods": VllmFlag(remedy=_CORS, values=1),
    "allowed-headers": VllmFlag(remedy=_CORS, values=1),
    "allow-credentials": VllmFlag(remedy=_CORS),
}

# Other spellings of these; a digit may follow -O.
SHORT = {
    "-sc": "speculative-config",
    "-cc": "compilation-config",
    "-O": "compilation-config",
}

# By flag: vLLM's name of a parser -> beheld's parser of the same format.
SAME: dict[str, dict[str, str]] = {
    "reasoning-parser": {"deepseek_r1": "think", "qwen3": "think"},
    "tool-call-parser": {"llama4_json": "llama3_json", "qwen3_xml": "qwen3_coder"},
}


def answer(name: str, value: str | None) -> int | None:
    """Log why a flag has no effect and return how many following words it uses; None for an unknown flag.

    Args:
        name: the flag without leading dashes, words joined by dashes; or one of SHORT.
        value: the flag's value, or the next word.

    Raises:
        ConfigError: the flag would have an effect that beheld does not offer.
    """
    name = SHORT.get(name.rstrip("0123456789"), name)
    known = FLAGS.get(name)
    if known is None:
        return None
    if known.why and known.values and value is None:
        raise ConfigError(f"--{name} needs a value.", known.remedy or "Leave it out.", param=name.replace("-", "_"))
    if not known.why or (known.only and value not in known.only):
        raise ConfigError(f"--{name} is not available here.", known.remedy, param=name.replace("-", "_"))
    _log("--%s changes nothing: %s.", name, known.why)
    return known.values


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
