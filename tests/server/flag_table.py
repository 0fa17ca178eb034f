"""The tables of all flags of `beheld serve` and of its fixed limits, made from what the code says of them.

python -m tests.server.flag_table      writes them into docs/reference
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from beheld.cli import vllm_flags
from beheld.core.config import EngineArgs
from beheld.flags.engine import SKIPPED
from beheld.flags.help import FLAG_HELP
from beheld.inputs.fetch import fetch, fetcher
from beheld.inputs.media import audio
from beheld.inputs.prompt import rendering
from beheld.server import http_protocol, limits, multipart
from beheld.server import serve as run
from beheld.server.options import ServerOptions
from beheld.structured import compile
from beheld.utils import env
from beheld.utils.pace import MIN_RATE
from tests.server.cases import ROOT

OPTIONS = ROOT / "docs" / "reference" / "options.md"
SERVER = ROOT / "docs" / "reference" / "server.md"
BEGIN = "<!-- made by `python -m tests.server.flag_table` -->\n"
END = "<!-- end of the table -->\n"
BEGIN_LIMITS = "<!-- limits made by `python -m tests.server.flag_table` -->\n"
END_LIMITS = "<!-- end of the limits -->\n"
BEGIN_FOREIGN = "<!-- vLLM's flags made by `python -m tests.server.flag_table` -->\n"
END_FOREIGN = "<!-- end of vLLM's flags -->\n"
# Not fields of anything: they say what is served, and where its engine runs.
OWN = (
    ("`MODEL`, `--model`", "the embedded model", "a folder or a hub name"),
    ("`--config`", "", "a YAML file of options, under the flags' names; flags go first"),
    (
        "`--engine`",
        "process with an NVIDIA GPU, else thread",
        "where the engine runs. A `process` has interpreter and cores "
        "to itself (7 % faster where 0.4 B parameters filled two cores) and can die without the server",
    ),
    (
        "`--api-server-count`, `-asc`",
        "1; with GPUs and four cores for each engine, as many as engines",
        "processes that speak HTTP and prepare requests, the engine being in a process of its own: "
        "[more requests a second](../how-to/several-engines.md#several-processes-that-speak-http)",
    ),
    ("`--enable-auto-tool-choice`", "always", "known for old scripts"),
)


def shown(default: Any, unit: int = 1) -> str:
    """A default as one would type it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int | float):
        return f"{default / unit:g}"
    return "" if default is None else str(default)


def table() -> str:
    """The table, with its markers."""
    lines = [BEGIN, "| flag | default | meaning |\n", "|---|---|---|\n"]
    rows = list(OWN)
    for field in dataclasses.fields(ServerOptions):
        told = field.metadata
        if "flag" in told:
            default = told.get("shown", shown(field.default, told.get("unit", 1)))
            rows.append((f"`--{told['flag']}`", default, told["meaning"]))
    for field in dataclasses.fields(EngineArgs):
        if field.name not in SKIPPED:
            words, meaning = FLAG_HELP[field.name]
            rows.append((f"`--{field.name.replace('_', '-')}`", words or shown(field.default), meaning))
    lines += [f"| {flag} | {default} | {meaning} |\n" for flag, default, meaning in rows]
    return "".join([*lines, END])


def fixed_limits() -> str:
    """The table of what no option changes, with its markers."""
    own = ServerOptions
    rows = [
        (
            "headers of a request",
            f"{http_protocol.MAX_HEADERS}, with the address {http_protocol.MAX_HEADER_BYTES >> 10} KiB",
        ),
        (
            "chunks of a body: of any size, and further ones on average",
            f"{http_protocol.MAX_TINY_CHUNKS:,}, {http_protocol.MIN_CHUNK_BYTES} bytes",
        ),
        ("time for the headers", f"{own.header_s:g} s"),
        (
            "time for the body",
            f"{own.body_s:g} s for each {own.body_s * MIN_RATE / 1024:g} KiB, {own.body_most_s:g} s at most",
        ),
        (
            "an answer of which less than 64 KiB are read while more waits, an idle connection",
            f"{own.send_s:g} s, {own.keep_alive_s:g} s",
        ),
        (
            "connections",
            "four for each of `--max-concurrent-requests` and 256 more; for clients that have few, a fourth more",
        ),
        (
            "JSON: depth, keys, lists and objects; also of the arguments of all tool calls together",
            f"{limits.JSON.depth}, {limits.JSON.keys:,}, {limits.JSON.containers:,}",
        ),
        ("JSON: values in lists and objects", f"{limits.JSON.values:,}, or twice the model's length if that is more"),
        ("JSON: digits of a whole number", f"{limits.JSON.digits}"),
        ("messages, parts of each", f"{limits.MAX_MESSAGES}, {limits.MAX_PARTS}"),
        ("further fields of a part", f"{limits.MAX_PART_FIELDS}"),
        ("`n`, and the prompts of a request", f"{own.max_answers} in all"),
        (
            "tools; letters and values of all of them",
            f"{own.max_tools}; {limits.MAX_TOOLS_LETTERS:,}, {limits.MAX_TOOLS_VALUES:,}",
        ),
        ("`metadata` of `/v1/responses`", f"{limits.MAX_METADATA} entries of {limits.MAX_METADATA_LETTERS:,} letters"),
        ("variables of a chat template (`chat_template_kwargs`)", f"{limits.MAX_VARIABLES}"),
        (
            "`stop`, `stop_token_ids`",
            f"{limits.MAX_STOPS} of {limits.MAX_STOP_LENGTH} characters, {limits.MAX_STOP_IDS}",
        ),
        ("`logit_bias`, `choice`", f"{limits.MAX_BIASES}, {limits.MAX_CHOICES}"),
        ("names", f"{limits.MAX_NAME} characters"),
        (
            "a form: fields, headers of each, texts",
            f"{multipart.MAX_PARTS}, {multipart.MAX_HEADER_BYTES} bytes, {multipart.MAX_TEXT_BYTES >> 10} KiB",
        ),
        ("a grammar", f"{compile.MAX_TEXT:,} characters; compiling it {env.GRAMMAR_TIMEOUT():g} s (see Environment)"),
        (
            "a request's template: time, its own letters, those that it writes",
            f"{rendering.MAX_S:g} s, {limits.MAX_TEMPLATE_LETTERS:,}, {rendering.MAX_CHARACTERS:,}",
        ),
        ("characters of a URL", f"{fetch.MAX_URL:,}"),
        ("redirects of a fetch", f"{fetch.MAX_REDIRECTS}"),
        ("addresses fetched at a time for one client, of one host", f"{fetcher._MAX_AT_ONCE}, {fetcher._MAX_PER_HOST}"),
        ("sampling rate of audio", f"from {audio._MIN_RATE:,} to {audio._MAX_RATE:,}"),
        ("an unanswered ping of the engine, before `/health` says that it hangs", f"{own.health_s:g} s"),
        ("what is read on after a refusal", f"{http_protocol._FAREWELL_S:g} s"),
        ("`/health` says that the engine is dead for", f"{run.DEAD_S:g} s"),
    ]
    lines = [BEGIN_LIMITS, "| what | limit |\n", "|---|---|\n"]
    return "".join([*lines, *(f"| {what} | {limit} |\n" for what, limit in rows), END_LIMITS])


def foreigners() -> str:
    """The table of vLLM's flags that are none here, with its markers."""
    lines = [BEGIN_FOREIGN, "| flag of vLLM | here |\n", "|---|---|\n"]
    for name, told in vllm_flags.FLAGS.items():
        if told.why:
            words = f"changes nothing: {told.why}" + ("; with another value refused" if told.only else "")
            flag = f"--{name} {told.only[0]}".strip() if told.only else f"--{name}"
        else:
            words, flag = f"refused. {told.remedy}".rstrip("."), f"--{name}"
            if told.unread:
                begun = " or ".join(f"`{one}`" for one in told.unread)
                words = f"patterns that begin with {begun} change nothing; others are {words}"
            if told.fields:
                named = ", ".join(f"`{one}`" for one in told.fields)
                words = f"{named} change nothing; other fields are {words}"
            if told.only:
                words = f"`{told.only[0]}` changes nothing; others are {words}"
        lines.append(f"| `{flag}` | {words} |\n")
    for name, values in vllm_flags.SAME.items():
        lines += [f"| `--{name} {value}` | is `{own}` |\n" for value, own in values.items()]
    return "".join([*lines, END_FOREIGN])


def pages() -> dict[Path, str]:
    """The pages that hold a table, each as it should be."""
    tables = (
        (OPTIONS, BEGIN, table(), END),
        (OPTIONS, BEGIN_FOREIGN, foreigners(), END_FOREIGN),
        (SERVER, BEGIN_LIMITS, fixed_limits(), END_LIMITS),
    )
    texts = {page: page.read_text(encoding="utf-8") for page in (OPTIONS, SERVER)}
    for page, begin, made, end in tables:
        before, rest = texts[page].split(begin)
        texts[page] = before + made + rest.split(end)[1]
    return texts


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
