"""Compares the names that vLLM offers with ours: options, parameters, methods, imports, routes and their fields.

python -m tests.compat.census VLLM_SOURCE           prints what vLLM has and beheld has not, with the reasons known
python -m tests.compat.census VLLM_SOURCE --names 0.33.0   writes vLLM's names into vllm_names.json, for this version

VLLM_SOURCE is a folder that contains the package `vllm`; its files are parsed and never run. The test needs no source:
it compares the kept names of each version with ours, and each one without a counterpart must stand in not_covered.json
with a reason.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from beheld.compat.grammars import StructuredOutputsParams
from beheld.compat.llm import REFUSED, ScriptLLM
from beheld.compat.names import MODULES
from beheld.core.config import EngineArgs
from beheld.core.outputs import CompletionOutput, RequestOutput
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PoolingParams
from beheld.core.vllm_options import OPTIONS
from beheld.server import pooling_schema, schema
from beheld.server.body_schema import Body
from beheld.server.generate_schema import GenerateRequest
from beheld.server.messages_schema import CountRequest, MessagesRequest
from beheld.server.responses_schema import ResponsesRequest
from beheld.server.speech_schema import TranscriptionRequest, TranslationRequest

HERE = Path(__file__).parent
NAMES = HERE / "vllm_names.json"
NOT_COVERED = HERE / "not_covered.json"

Names = dict[str, set[str]]

# Class of vLLM -> its file and our class.
CLASSES = {
    "SamplingParams": ("sampling_params.py", SamplingParams),
    "StructuredOutputsParams": ("sampling_params.py", StructuredOutputsParams),
    "PoolingParams": ("pooling_params.py", PoolingParams),
    "CompletionOutput": ("outputs.py", CompletionOutput),
    "RequestOutput": ("outputs.py", RequestOutput),
}
# Class of a request's body in vLLM -> ours.
REQUESTS: dict[str, type[Body]] = {
    "ChatCompletionRequest": schema.ChatRequest,
    "CompletionRequest": schema.CompletionRequest,
    "ResponsesRequest": ResponsesRequest,
    "AnthropicMessagesRequest": MessagesRequest,
    "AnthropicCountTokensRequest": CountRequest,
    "TokenizeCompletionRequest": schema.TokenizeRequest,
    "TokenizeChatRequest": schema.TokenizeRequest,
    "DetokenizeRequest": schema.DetokenizeRequest,
    "EmbeddingCompletionRequest": pooling_schema.EmbeddingRequest,
    "EmbeddingChatRequest": pooling_schema.EmbeddingRequest,
    "PoolingCompletionRequest": pooling_schema.PoolingRequest,
    "PoolingChatRequest": pooling_schema.PoolingRequest,
    "ClassificationCompletionRequest": pooling_schema.ClassifyRequest,
    "ClassificationChatRequest": pooling_schema.ClassifyRequest,
    "RerankRequest": pooling_schema.RerankRequest,
    "ScoreTextRequest": pooling_schema.ScoreRequest,
    "ScoreDataRequest": pooling_schema.ScoreRequest,
    "ScoreQueriesDocumentsRequest": pooling_schema.ScoreRequest,
    "TranscriptionRequest": TranscriptionRequest,
    "TranslationRequest": TranslationRequest,
    "GenerateRequest": GenerateRequest,
}
# Modules from which scripts import.
_IMPORTED = (
    *("assets.audio", "assets.image", "assets.video", "engine.arg_utils", "inputs", "lora.request"),
    *("multimodal.utils", "multimodal.image", "outputs", "pooling_params", "sampling_params"),
    *("utils.argparse_utils", "utils.network_utils"),
)


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(_parse(path)) if isinstance(node, ast.ClassDef)}


def _fields(kind: ast.ClassDef) -> set[str]:
    """Annotated fields of the class; where it has none, the arguments of its constructor."""
    found = {
        node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in kind.body:
        if not found and isinstance(node, ast.FunctionDef) and node.name == "__init__":
            found = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)} - {"self"}
    return {name for name in found if not name.startswith("_")}


def _methods(package: Path) -> set[str]:
    """Public methods of LLM and of the classes that it is made of."""
    known: dict[str, ast.ClassDef] = {}
    for path in (package / "entrypoints").rglob("*.py"):
        known |= _classes(path)
    found: set[str] = set()
    left = ["LLM"]
    while left:
        kind = known.get(left.pop())
        if kind is not None:
            found |= {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
            left += [ast.unparse(parent) for parent in kind.bases]
    return {name for name in found if not name.startswith("_")}


def _imports(package: Path) -> set[str]:
    """`module.name` of each public name that stands in `__all__`, or else is defined in the module."""
    found = set()
    for module in ("", *_IMPORTED):
        path = package / module.replace(".", "/") / "__init__.py"
        tree = _parse(path if path.is_file() else path.parent.with_suffix(".py"))
        names: Iterable[str] = [n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = ast.literal_eval(node.value)
        home = f"vllm.{module}".rstrip(".")
        found |= {f"{home}.{name}" for name in names if not name.startswith("_")}
    return found


def _requests(package: Path) -> Names:
    """Fields of bodies of requests, those of their parents included."""
    known: dict[str, ast.ClassDef] = {}
    for path in (package / "entrypoints").rglob("*.py"):
        for name, kind in _classes(path).items():
            if name not in known or path.name == "protocol.py":
                known[name] = kind

    def of(name: str) -> set[str]:
        kind = known.get(name)
        if kind is None:
            return set()
        own = {
            node.target.id
            for node in kind.body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and not ast.unparse(node.annotation).startswith("ClassVar")
        }
        own = {each for each in own if not each.startswith("_")}
        return own.union(*(of(ast.unparse(parent)) for parent in kind.bases))

    return {name: of(name) for name in REQUESTS if name in known}


def _taken(kind: type[Body]) -> set[str]:
    """The fields of a body, those included that are accepted without effect or where they ask for nothing."""
    fields_ = {field.alias or name for name, field in kind.model_fields.items()}
    return fields_ | set(kind.without_effect) | set(kind.says_nothing)


def _routes(package: Path) -> set[str]:
    """Paths of the HTTP routes, whatever their methods."""
    called = re.compile(r"@\w*router\.(?:get|post|put|delete|api_route|websocket)\(\s*\"(/[^\"]*)\"")
    texts = (path.read_text(encoding="utf-8") for path in (package / "entrypoints").rglob("*.py"))
    return {_path(found) for text in texts for found in called.findall(text)}


def _path(path: str) -> str:
    """A route with its parameters' names left out."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def names_of(source: Path) -> Names:
    """vLLM's names by kind."""
    package = source / "vllm" if (source / "vllm").is_dir() else source
    arguments = _classes(package / "engine" / "arg_utils.py")
    found = {
        "EngineArgs": _fields(arguments["EngineArgs"]) | _fields(arguments["AsyncEngineArgs"]),
        "LLM": _methods(package),
        "imports": _imports(package),
        "routes": _routes(package),
    }
    for name, (path, _) in CLASSES.items():
        found[name] = _fields(_classes(package / path)[name])
    return found | _requests(package)


def our_names() -> Names:
    """Beheld's names by kind, options that are refused with a remedy included."""
    from tests.server.running import Running

    running = Running(operator_routes=True, changes_loras=True, tells_tokenizer=True)
    try:
        routes = {_path(route.path) for route in running.app.routes}  # type: ignore[attr-defined]
    finally:
        running.close()
    found = {
        "EngineArgs": {each.name for each in fields(EngineArgs)}
        | {name for name in OPTIONS if not name.startswith("_")},
        "LLM": {name for name in dir(ScriptLLM) if not name.startswith("_") and name not in REFUSED},
        "imports": {f"{module}.{name}" for module, names in MODULES.items() for name in names},
        "routes": routes,
    }
    for name, (_, kind) in CLASSES.items():
        found[name] = {each for each in dir(kind) if not each.startswith("_")} | {each.name for each in fields(kind)}
    return found | {name: _taken(kind) for name, kind in REQUESTS.items()}


def missing(theirs: Mapping[str, Iterable[str]], ours: Names) -> dict[str, list[str]]:
    """By kind, what vLLM has and beheld has not."""
    return {kind: sorted(set(names) - ours[kind]) for kind, names in theirs.items()}


def kept_names() -> dict[str, dict[str, list[str]]]:
    """Version of vLLM -> kind -> names."""
    kept: dict[str, dict[str, list[str]]] = json.loads(NAMES.read_text(encoding="utf-8"))
    return kept


def reasons() -> dict[str, dict[str, str]]:
    """Kind -> name -> why it is not covered."""
    kept = json.loads(NOT_COVERED.read_text(encoding="utf-8"))
    return {kind: {name: why for why, names in told.items() for name in names} for kind, told in kept.items()}


def main(words: list[str]) -> int:
    """Print or write; the exit status is 1 where a name has no reason."""
    theirs = names_of(Path(words[0]))
    if "--names" in words:
        kept = kept_names() | {words[words.index("--names") + 1]: {kind: sorted(theirs[kind]) for kind in theirs}}
        NAMES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    ours, told, status = our_names(), reasons(), 0
    for kind, names in missing(theirs, ours).items():
        print(f"{kind}: {len(theirs[kind]) - len(names)} of {len(theirs[kind])}")
        for name in names:
            why = told.get(kind, {}).get(name)
            status |= why is None
            print(f"  {name}: {why or 'NO REASON'}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
