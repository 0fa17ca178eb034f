"""The numbered cases of what the server must withstand, and which tests run each of them.

    python -m tests.server.cases > docs/reliability.md

A test runs a case if its name begins with the case's number (`test_37_json_abuse`) or if it is marked with it
(`@pytest.mark.case(37)`, also for a whole file by `pytestmark`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

CASES: dict[int, str] = {
    1: "addresses that must not be asked",
    2: "URLs that two parsers read in two ways",
    3: "redirects to where a URL may not lead",
    4: "names whose address changes after the check",
    5: "credentials and proxies are never used",
    6: "endless bodies, wrong lengths, compressed bodies",
    7: "slow and silent servers",
    8: "a thousand media parts",
    9: "hung fetches next to plain text",
    10: "local files",
    11: "addresses in text",
    12: "data URLs",
    13: "malformed tensors",
    14: "a compressed archive of a tensor",
    15: "headers of npy and safetensors that lie",
    16: "bad tensors among good ones, from many threads",
    17: "no pickle is loaded",
    18: "garbage between the processes",
    19: "what listens",
    20: "an undecodable frame to the engine",
    21: "a pixel bomb",
    22: "images that lie about themselves",
    23: "extreme shapes",
    24: "other formats",
    25: "modes, rotations, animations",
    26: "a flood of frames",
    27: "options of videos",
    28: "videos that lie about themselves",
    29: "audio that lies or is too long",
    30: "uploads",
    31: "a decoder that dies or hangs",
    32: "features that do not fit their placeholders",
    33: "numbers",
    34: "sampling parameters in pairs",
    35: "ids beyond the vocabulary next to another request",
    36: "many prompts, empty prompts, lengths at the limit",
    37: "JSON",
    38: "HTTP framing",
    39: "the key on every route",
    40: "the time that a wrong key takes",
    41: "internal fields",
    42: "texts that are hard to tokenize",
    43: "large requests for ids and log-probabilities",
    44: "regular expressions that run away",
    45: "schemas and grammars",
    46: "many grammars",
    47: "slow grammars next to another request",
    48: "grammars without an end",
    49: "templates in requests",
    50: "templates of checkpoints",
    51: "malformed tool calls",
    52: "tools that lie",
    53: "placeholders in text",
    55: "adapters",
    56: "digests",
    57: "two keys share nothing",
    58: "names of media given by clients",
    59: "small caches under changing traffic",
    60: "memory that was not written",
    61: "clients that go away",
    62: "half-closed, reset and unread connections",
    63: "slow requests",
    64: "floods of connections",
    65: "overload",
    66: "the engine is killed",
    67: "the engine is stopped",
    68: "the server is killed",
    69: "signals",
    70: "ports and restarts",
    71: "no disk to write to",
    72: "too little memory",
    73: "NaN, and an engine that dies",
    74: "errors of the device",
    75: "clocks and descriptors",
    76: "a blocked event loop",
    77: "what the log holds",
    78: "labels of metrics",
    79: "load",
    80: "soak",
    81: "the OpenAPI document, fuzzed",
    82: "the scheduler as a state machine",
    84: "fuzz on the wire",
    85: "any order",
    86: "every route has every guard",
    87: "bodies of requests in tiny chunks, long trailers",
    88: "bodies without the key",
    89: "fetched answers in tiny pieces",
    90: "long texts that are to be truncated",
    91: "JSON within JSON: the arguments of tool calls",
    92: "unknown keys of megabytes",
    93: "control tokens spelled in long texts",
    94: "far too many token ids",
    95: "addresses of megabytes",
    96: "one client's long prompts next to another's short one",
    97: "requests that make steps fail, again and again",
    101: "bodies of 60 MB",
    102: "one client's fetches",
    103: "audio that cannot be decoded or measured",
    104: "parameters that leave no finite logit",
    105: "templates that cannot be translated, or loop",
    106: "halves of control tokens in several messages",
    107: "a deleted working directory",
    111: "a limit on the server's address space",
    112: "damaged and hostile files of a checkpoint, and weights or settings that give nothing finite",
    113: "300 generated damages to all files of a checkpoint, within 5 s and 1 GiB beyond a healthy start",
    114: "a choice that is one long run of emoji",
    108: "media that cost far more work than their bytes",
    110: "large images where memory is limited",
    118: "documents that are broken, encrypted, endless or huge",
    109: "one client's media next to another's",
    119: "log-probabilities of many long prompts",
    120: "items whose tower fails next to others",
    121: "standard streams that are closed",
    122: "tokenizers that make much of little text, or take long",
    123: "damaged and hostile adapters",
    124: "frames of a video in memory",
    125: "/health during long steps",
    126: "one client that takes all answers, connections or bytes of bodies",
    127: "many small requests of one client at once",
    128: "many long stop strings, and variables of templates in thousands",
    129: "many bodies of one client with tens of thousands of keys",
    130: "conversations of hundreds of messages, while another client chats",
    131: "processes that open media and render templates want all cores",
    132: "the largest permitted images, while others ask",
    133: "one of several processes that speak HTTP hangs",
    134: "no descriptors or no memory for messages between processes",
    135: "hostile clients of requests that one process that speaks HTTP passes on to another",
    136: "tools, schemas, metadata and content parts in hundreds of thousands of values, and answers that repeat them",
    137: "handshakes of TLS that do not end",
    138: "forms whose content nearly holds their boundary",
    139: "answers that nobody reads, and requests that wait to be parsed, of thousands of connections",
    140: "many connections at once: opened and cut off by the thousand, or all asking in one moment",
    141: "requests in a row on each of hundreds of connections",
    142: "log-probabilities of many candidates, of many answers at once",
    143: "bodies that take far more memory than their bytes, as they are parsed or while they are answered",
    144: "allowed token ids of a whole vocabulary, among requests that come and go",
}

# Cases whose tests were seen to fail after the change that they guard was taken back: case -> what was taken back.
SEEN_TO_FAIL: dict[int, str] = {
    87: "turns, the bound of tiny chunks, and the pieces in which h11 has trailers in `server/http_protocol.py`",
    88: "dropping a body at an early answer in `server/http_protocol.py`",
    90: "reading only the end of a long text and the look at its length in `inputs/prompt/reader.py` (both took more "
    "than 3 GB), and the bound of characters in `inputs/prompt/tokenizer.py`",
    91: "the bounds of arguments in `inputs/prompt/chat.py` (7 of 9; many values are also refused when rendered)",
    92: "the length of a misspelt name in `core/value_checks.py`, and that of a key in `utils/piecewise_json.py`",
    93: "finding stand-ins by a pattern in `inputs/prompt/special_tokens.py`, and the stretches of two texts and "
    "passing over ASCII in `inputs/prompt/chat.py`",
    94: "counting ids first in `inputs/prompt/reader.py`",
    95: "the limit of a URL in `inputs/fetch/fetch.py`",
    96: "the names of clients in `server/clients.py` (the tests of the server), and shares in "
    "`scheduler/scheduler.py` (its tests then do not end)",
    97: "the refusal of culprits in `server/clients.py`",
    101: "mapped pages in `server/arriving_body.py`, steps of base64 in `inputs/fetch/fetch.py` and of JSON in "
    "`utils/piecewise_json.py`",
    102: "room for what has come in `inputs/fetch/pinned_http.py`, the first request's rest and each client's part in "
    "`inputs/fetch/shares.py`, and the turns that `inputs/fetch/fetcher.py` leaves to others: of names, of all hosts "
    "and of each",
    103: "each of the three checks in `inputs/media/audio.py` and `container.py`",
    104: "the lowest penalty in `core/params.py`, and the look at allowed ids in `inputs/sampling/resolve_sampling.py`",
    105: "the threads of strangers' templates in `api/pools.py`, and the answer to a SyntaxError in "
    "`inputs/prompt/rendering.py`",
    106: "`_broken_across` in `inputs/prompt/chat.py` (system and tool messages, where the template writes nothing "
    "between two), and its cache",
    107: "leaving the directory in `cli/main.py`",
    108: "an image's time by its size in `inputs/media/tasks.py` (`test_an_images_time_follows_its_size`)",
    110: "`fit_media` in `api/start.py` (`test_limits_follow_the_memory_that_a_container_leaves`)",
    111: "the answer for missing memory in `server/errors.py`",
    120: "the calls without culprits in `runner/encoder_cache.py` "
    "(`test_120_mates_of_failing_items_keep_their_bits`, where all items fit one call)",
    121: "`utils/standard_streams.py` (the socket pair took the numbers 0 and 1)",
    122: "the checks of decoders, templates and tokens in `checkpoint/checks/tokenizer.py`",
    123: "the time limit of patterns in `lora/load.py`, and the names of files in its errors",
    124: "the array that is filled frame by frame in `inputs/media/video.py`",
    126: "what clients that have few may have beyond the limits, and one client's part of all bytes, in "
    "`server/admission.py`",
    127: "turns in `server/request_turns.py` and of `api/pools.py`, the document that is kept in `server/app.py`, and "
    "the queue in `server/listen.py`",
    128: "tables that grow with what matched in `text/stop.py`, and the number of variables in `server/schema.py`",
    129: "rests in `utils/host_turns.py`, and the turns of clients in `server/read.py`",
    130: "threads for slow conversations in `api/pools.py`, one at a time and with rests by `utils/host_turns.py`",
    131: "both calls of `utils/cpu_weight.py` in `sandbox/forkserver.py`",
    132: "processing in workers what is large, in `inputs/media/workers.py`",
    134: "`NoRoomError` in `wire/link.py` (the threads that send then end)",
    136: "the bounds of tools, metadata and what responses repeat in `server/limits.py`, the thread that checks a long "
    "history and the turns of a response's events in `server/app.py`, the thread that plans in `server/read.py`, the "
    "messages that go one by one in `server/chat_messages.py`, and the look at a grammar's size in "
    "`structured/compile.py`",
    137: "places, the oldest handshake that makes room for the next one, and small buffers, in `server/tls.py`",
    138: "the windows of a boundary's search, those of a file's copy, and what two windows share, in "
    "`server/multipart.py`",
    139: "the bound of what connections keep in `server/http_protocol.py`",
    140: "the number of connections that begin in a turn and of those that wait, and the look at those that have left, "
    "in `server/acceptor.py`, and the number that are parsed in a turn in `server/parse_turns.py`",
    141: "the turn of a next request, and closing with what was written, in `server/http_protocol.py`",
    142: "the version before of `server/chat.py`, `completions.py` and `answer.py` (chat, named tokens, completion)",
    143: "what counts of a parsed body in `server/read.py`, its bound in `server/admission.py`, texts that are JSON in "
    "`utils/bounded_json.py`, and what an answer does not keep in `server/app.py`",
    144: "arrays in `sample/filters.py`",
}


@cache
def runs(folder: Path = ROOT / "tests") -> dict[int, list[str]]:
    """Case -> the tests that run it, as "path::name", in order."""
    found: dict[int, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        everywhere = [n for node in tree.body if _is_pytestmark(node) for n in _marked(node.value)]  # type: ignore[attr-defined]
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("Test"):
                # A state machine's test case.
                for number in everywhere:
                    found.setdefault(number, []).append(f"{path.relative_to(ROOT)}::{ast.unparse(node.targets[0])}")
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test"):
                continue
            numbers = {*everywhere, *(n for mark in node.decorator_list for n in _marked(mark))}
            numbered = re.match(r"test_(\d{1,3})_", node.name)
            if numbered:
                numbers.add(int(numbered[1]))
            for number in sorted(numbers):
                found.setdefault(number, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]


def _marked(node: ast.expr) -> Iterator[int]:
    """The numbers of the case marks within an expression."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.case":
            for argument in call.args:
                yield int(ast.literal_eval(argument))


def page() -> str:
    """The table of all cases."""
    lines = [
        "# What beheld withstands, and the tests that show it",
        "",
        "Made by `python -m tests.server.cases > docs/reliability.md`. Long forms run with `BEHELD_LONG=1`;",
        "`BEHELD_LONG_SCALE=0.01` shortens them to a hundredth.",
        "",
        "| case | what | tests |",
        "|---|---|---|",
    ]
    found = runs()
    for number, what in sorted(CASES.items()):
        names = "<br>".join(f"`{name.removeprefix('tests/')}`" for name in found.get(number, ()))
        lines.append(f"| {number} | {what} | {names} |")
    lines += ["", "Tests of these cases were seen to fail after what they guard was taken back:", ""]
    lines += [f"- {number}: {what}." for number, what in SEEN_TO_FAIL.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
