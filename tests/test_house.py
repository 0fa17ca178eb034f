"""The house rules as tests: import directions, docstrings, names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "beheld"
FILES = sorted(HOUSE.rglob("*.py"))
TRAINING = sorted((ROOT / "training").rglob("*.py"))

# Package -> the packages of ours that it may import. Everyone may use core and utils; core and utils use no one.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "utils": set(),
    "platform": set(),
    "mote": set(),
    "families": {"families/model"},
    # What the third section of a family answers; the types in it are those of the device's half.
    "families/model": {"attention", "models/surgery/operation"},
    # What an operation on a model is; families bring some, and models/ applies them.
    "models/surgery/operation": {"lora", "parallel"},
    "families/*/inputs": {"families", "inputs", "checkpoint"},
    "families/*/model": {
        "families",
        "families/model",
        "models",
        "models/surgery/operation",
        "attention",
        "checkpoint",
        "platform",
    },
    "checkpoint": {"mote", "families"},
    # How values go from process to process.
    "wire": set(),
    "sandbox": {"platform", "wire"},
    # Which variables a process on another host needs.
    "cluster": {"platform"},
    "encoders": {"wire"},
    "inputs": {"families", "checkpoint", "structured", "sandbox", "encoders", "wire"},
    "text": set(),
    "scheduler": set(),
    # What the scheduler asks of it stands in scheduler/outside.py.
    "kvstore": set(),
    "structured": {"sandbox", "wire"},
    "parallel": {"platform"},
    "attention": {"platform"},
    "sample": {"platform"},
    "pool": {"platform"},
    "lora": {"attention", "parallel", "platform"},
    "quant": {"checkpoint", "families", "parallel", "platform"},
    "models": {
        "models/surgery/operation",
        "families",
        "families/model",
        "checkpoint",
        "lora",
        "quant",
        "quant/availability",
        "attention",
        "parallel",
        "platform",
    },
    "runner": {"models", "sample", "pool", "attention", "parallel", "platform"},
    "executor": {"runner", "parallel", "platform", "cluster", "wire"},
    # Where a method of quantization runs is known without torch.
    "quant/availability": {"platform"},
    "engine": {
        *("cluster", "encoders", "kvstore", "scheduler", "structured", "executor", "checkpoint", "platform", "wire"),
        "quant/availability",
    },
    "api": {"inputs", "text", "engine", "structured", "platform"},
    "server": {"api", "text"},
    "jobs": {"server", "api", "cluster"},
    "flags": {"platform"},
    "compat": {"api", "inputs", "families", "flags", "checkpoint", "platform"},
    "tools": {"families", "checkpoint", "inputs", "engine", "executor", "models", "platform"},
    "cli": {
        "flags",
        "cluster",
        "jobs",
        "server",
        "api",
        "checkpoint",
        "engine",
        "compat",
        "encoders",
        "tools",
        "platform",
        "families",
        "mote",
    },
}
NO_TORCH = {"core", "utils", "scheduler", "kvstore", "structured", "text", "server", "jobs", "cli"}
FORBIDDEN_FILES = {"utils.py", "helpers.py", "manager.py", "base.py"}
FORBIDDEN_IN_CLASSES = ("Base", "Impl", "Manager", "Mixin")


def package_of(path: Path) -> str | None:
    """The room below beheld/ that a file belongs to; None for beheld/__init__.py."""
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return room_of(parts) if len(parts) > 1 else None


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module, by the parts of its name below beheld/: its package, but families have several.

    The sections of a family are loaded apart, so each is a room; what a folder itself says imports neither torch nor
    another room.
    """
    if "/".join(parts) in ("models/surgery/operation", "quant/availability"):
        return "/".join(parts)
    if parts[0] != "families":
        return parts[0]
    if parts[1:] == ("model",):
        return "families/model"
    if len(parts) < 3 or parts[-1] in ("__init__", "config"):
        return "families"
    return "families/*/inputs" if parts[-1] in ("inputs", "processing") else "families/*/model"


def imports_of(tree: ast.AST) -> set[str]:
    """Every module imported anywhere in a file, also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "beheld")
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def for_each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test of a rule for files, which names all that break it: eight thousand tests take half a minute."""

    def of(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    broken.append(f"{name(path)}: {error}")
            assert not broken, "\n".join(broken)

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return of


@for_each(FILES)
def test_import_directions(path: Path) -> None:
    package = package_of(path)
    for module in imports_of(parse(path)):
        if module == "torch" or module.startswith(("torch.", "torchvision")):
            assert package not in NO_TORCH, f"{package} must not import {module}"
        if not module.startswith("beheld."):
            continue
        other = room_of(tuple(module.split(".")[1:]))
        if package is None or other == package or other not in MAY_IMPORT:
            continue
        allowed = set() if package in ("core", "utils") else MAY_IMPORT[package] | {"core", "utils"}
        if package == "utils":
            allowed = {"utils"}
        assert other in allowed, f"{package} may not import {module}"


def test_import_table_has_no_cycle_and_names_every_package() -> None:
    packages = {p for f in FILES if (p := package_of(f)) is not None}
    assert packages == set(MAY_IMPORT)
    order: list[str] = []

    def visit(package: str, path: tuple[str, ...]) -> None:
        assert package not in path, f"cycle: {' -> '.join((*path, package))}"
        if package not in order:
            for other in MAY_IMPORT[package]:
                visit(other, (*path, package))
            order.append(package)

    for package in MAY_IMPORT:
        visit(package, ())


def test_what_may_be_imported_is() -> None:
    used: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        modules = [module.split(".") for module in imports_of(parse(path)) if module.startswith("beheld.")]
        used[package_of(path) or ""].update(room_of(tuple(names[1:])) for names in modules)
    unused = {room: allowed - used[room] for room, allowed in MAY_IMPORT.items()}
    assert {room: left for room, left in unused.items() if left} == {}, "take them out of MAY_IMPORT"


def test_the_page_of_architecture_names_each_room() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE))
    assert named == {folder.name for folder in HOUSE.iterdir() if (folder / "__init__.py").is_file()}


def test_no_file_imports_itself_by_way_of_others() -> None:
    """No cycle between files; imports inside functions and under TYPE_CHECKING count, too."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    imported = {module: files_imported(parse(path), set(files)) - {module} for module, path in files.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for other in sorted(imported[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in files:
        visit(module, ())


def files_imported(tree: ast.AST, files: set[str]) -> set[str]:
    """The files among `files` that a file imports; `from package import file` imports the file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in files else node.module)
    return found & files


@for_each(FILES + TRAINING)
def test_module_docstring(path: Path) -> None:
    docstring = ast.get_docstring(parse(path))
    assert docstring, "a module says what it is"
    first = docstring.splitlines()[0]
    assert first.endswith("."), f"not one sentence ended by a full stop: {first!r}"


@for_each(FILES)
def test_public_things_have_docstrings(path: Path) -> None:
    for node in parse(path).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        assert ast.get_docstring(node), f"{node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_"):
                    assert ast.get_docstring(method), f"{node.name}.{method.name} has no docstring"


def test_the_reference_names_each_parameter_alone() -> None:
    """In docstrings that the site shows, an entry of `Args:` is one parameter; the strict build refuses others."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    modules = {shown.rpartition(".")[0] for shown in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    assert "beheld.api.llm" in modules
    for module in modules:
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                section = (ast.get_docstring(node) or "").partition("Args:\n")[2].partition("\n\n")[0]
                given = node.args
                rest = filter(None, (given.vararg, given.kwarg))
                names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *rest)}
                entries = set(re.findall(r"^    \**(\S[^:]*):", section, re.MULTILINE))
                assert entries <= names, f"{name(path)}: {node.name} has no parameter {entries - names}"


@for_each(FILES)
def test_names(path: Path) -> None:
    assert path.name not in FORBIDDEN_FILES
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef):
            assert not any(word in node.name for word in FORBIDDEN_IN_CLASSES), node.name


def test_each_class_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name(path)}:{node.lineno}")
    assert {word: found for word, found in places.items() if len(found) > 1} == {}


# Turns over which a reader stumbles.
BANNED_TURNS = re.compile(
    r"\bwhoever\b|\btold\b|\breckon|\bwhat (?:was|is) said\b|\bas dear as\b|\bbehind that\b|\bbeside\b", re.IGNORECASE
)
WORDS = {tokenize.NAME, tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


@for_each([*FILES, *(path for folder in ("benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py")))])
def test_plain_words(path: Path) -> None:
    """No banned turn in docstrings, comments, strings and names."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            found = BANNED_TURNS.search(token.string) if token.type in WORDS else None
            assert found is None, f"line {token.start[0]}: {found.group(0)!r}"


PAGES = [
    *(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "experiments" not in page.parts),
]


@for_each(PAGES)
def test_plain_words_on_pages(path: Path) -> None:
    """No banned turn on pages for users; the record of experiments keeps what it says."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = BANNED_TURNS.search(line)
        assert found is None, f"line {number}: {found.group(0)!r}"


# Pages that say where in the code something is.
GUIDES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs" / "explanation" / "architecture.md",
    *sorted((ROOT / "docs" / "how-to").glob("add-*.md")),
]


@cache
def members() -> dict[str, set[str]]:
    """Class of the house -> the names of its methods and fields, those that it inherits, too."""
    found: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                own = found[node.name] = set()
                for each in ast.walk(node):
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                        own.add(each.name)
                    elif isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store):
                        own.add(each.id if isinstance(each, ast.Name) else each.attr)
    for kind in found:
        found[kind] = found[kind].union(*(found.get(base, set()) for base in bases[kind]))
    return found


@for_each(GUIDES)
def test_guides_name_files_and_names_that_exist(path: Path) -> None:
    code = [file for folder in (HOUSE, ROOT / "tests", ROOT / "benchmarks") for file in sorted(folder.rglob("*.py"))]
    files = {str(file.relative_to(ROOT)) for file in code}
    words = set(re.findall(r"\w+", " ".join(file.read_text(encoding="utf-8") for file in code)))
    for shown in re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8")):
        if re.fullmatch(r"[\w/]+\.py", shown):
            assert any(f"/{file}".endswith(f"/{shown}") for file in files), f"there is no file {shown}"
        elif re.fullmatch(r"[A-Za-z_][\w.]*", shown) and not shown.endswith((".md", ".json", ".jinja")):
            assert set(shown.split(".")) <= words, f"nothing is called {shown}"
            kind, _, name = shown.partition(".")
            assert not name or kind not in members() or name in members()[kind], f"{kind} has no {name}"


# File -> names that are a model type too, and stand there for something else.
NOT_MODEL_TYPES = {
    # vLLM's names of formats for reasoning and calls.
    "beheld/cli/vllm_flags.py": {
        *("cohere", "deepseek_v3", "deepseek_v4", "hy_v3", "jamba", "kimi_k2", "minicpmv", "minimax", "minimax_m2"),
        *("muse_glimmer", "qwen3", "step3p5"),
    },
    # The architecture of files that hold a model's vision part.
    "beheld/checkpoint/gguf/config.py": {"clip"},
    # The files' names of kinds of tokenizers, and of rules that cut a text into words.
    "beheld/checkpoint/gguf/tokenizer.py": {"llama", "qwen2", "gpt2", "pixtral"},
    # Names of formats for tool calls.
    "beheld/structured/calls.py": {"mistral"},
    "beheld/text/tools/formats.py": {
        *(
            "mistral",
            "deepseek_v3",
            "olmo3",
            "deepseek_v32",
            "deepseek_v4",
            "kimi_k2",
            "gemma4",
            "jamba",
            "cohere",
            "nemotron",
            "lfm2",
            "granite",
            "apertus",
            "hy_v3",
            "seed_oss",
        ),
        "minimax_m2",
    },
    # Names of formats of reasoning.
    "beheld/text/reasoning.py": {
        *("apertus", "cohere", "gemma4", "granite", "mistral", "muse_glimmer", "olmo3", "seed_oss", "step3p5"),
    },
}


@cache
def family_names() -> frozenset[str]:
    """Model types and architectures: those that the families answer to, and those that transformers knows."""
    from transformers.models.auto import modeling_auto, processing_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from beheld.families.registry import families

    names = set(CONFIG_MAPPING_NAMES)
    tables = [getattr(modeling_auto, name) for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")]
    for table in (*tables, processing_auto.PROCESSOR_MAPPING_NAMES):
        for classes in table.values():
            names.update([classes] if isinstance(classes, str) else filter(None, classes))
    for family in families().values():
        names.update(family.model_types, family.architectures, family.processors)
        names.update(row.architecture for row in family.tested)
    return frozenset(names)


@for_each([path for path in FILES if "families" not in path.parts])
def test_no_family_is_named_outside_its_folder(path: Path) -> None:
    strings = {node.value for node in ast.walk(parse(path)) if isinstance(node, ast.Constant)}
    found = {text for text in strings if isinstance(text, str)} & family_names()
    assert found == NOT_MODEL_TYPES.get(name(path), set())


def test_facts_of_families_import_no_torch() -> None:
    code = (
        "import sys\nfrom beheld.families import page, registry\npage.markdown()\n"
        "assert len(registry.families()) > 50\n"
        "assert not {'torch', 'transformers', 'PIL', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_name_belongs_to_one_family() -> None:
    """A model type has one family that is found by it alone; an architecture and a processor have one at most."""
    from beheld.families.registry import families, find

    types: dict[str, str] = {}
    others: dict[tuple[str, str], str] = {}
    for package, family in families().items():
        assert family.model_types, package
        for model_type in family.model_types:
            assert family.processors or types.setdefault(model_type, package) == package
            for processor in family.processors:
                assert others.setdefault((model_type, processor), package) == package
                assert find(model_type, (), (processor,)) == package
        for architecture in family.architectures:
            assert others.setdefault(("", architecture), package) == package
            assert find(None, (architecture,)) == package
    assert all(find(model_type) == package for model_type, package in types.items())


# What only platform/ says: the names of a device, and libraries of one vendor.
DEVICE_WORDS = re.compile(
    r"""["']cuda|torch\.cuda|\bis_cuda\b|\bdevice\.type\b|\bdevice [!=]= ["']|[!=]= ["'](?:cpu|cuda)\b"""
    r"""|["'](?:cpu|cuda)["'] [!=]=|["']/?(?:dev/)?nvidia(?!/)|torch\.backends\.cud|\bversion\.(?:hip|cuda)\b"""
    r"""|\bget_device_(?:capability|properties)\b|\bextra\.cuda\b|["']CUDA_|\blanguage\.nvidia\b"""
    r"""|NCCL|\bnccl\b"""
)
NAMES_A_DEVICE = {"attention/hopper_prefill.py": "instructions of Hopper within a Gluon kernel"}


@for_each(FILES)
def test_only_the_platform_asks_which_device_this_is(path: Path) -> None:
    found = DEVICE_WORDS.search(path.read_text(encoding="utf-8"))
    excused = package_of(path) == "platform" or str(path.relative_to(HOUSE)) in NAMES_A_DEVICE
    assert excused or found is None, f"{found.group(0)!r}: ask platform_of(device) what the device can do"


def test_files_that_name_a_device_still_do() -> None:
    for path in NAMES_A_DEVICE:
        assert DEVICE_WORDS.search((HOUSE / path).read_text(encoding="utf-8")), f"{path} needs no exception any more"


# Hardware of one vendor, in messages: Platform.needs says it.
HARDWARE_WORDS = re.compile(r"\bcompute capabilit|\b(?:Ampere|Hopper|Blackwell)\b", re.IGNORECASE)


@for_each(FILES)
def test_only_the_platform_s_words_name_a_vendor_s_hardware(path: Path) -> None:
    if package_of(path) == "platform":
        return
    tree = parse(path)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found = HARDWARE_WORDS.search(node.value)
            assert found is None, f"{found.group(0)!r} in a message: take it from Platform.needs"


@for_each(FILES)
def test_only_setup_names_an_executor(path: Path) -> None:
    if package_of(path) == "executor" or path == HOUSE / "engine" / "setup.py":
        return
    text = path.read_text(encoding="utf-8")
    assert "LocalExecutor" not in text
    assert "executor.local" not in text


# Who may name a kind of cache group: the two registries, and those that read which kinds a model has.
NAMES_A_KIND = {
    "scheduler/cache/registry.py",
    "runner/cache/registry.py",
    "checkpoint/info.py",
}


@for_each(FILES)
def test_nobody_asks_for_a_kind_of_cache_group_by_name(path: Path) -> None:
    from beheld.scheduler.cache.registry import KINDS

    if path.is_relative_to(HOUSE / "families"):
        return
    if str(path.relative_to(HOUSE)) in NAMES_A_KIND:
        named = {node.value for node in ast.walk(parse(path)) if isinstance(node, ast.Constant)}
        assert not named.isdisjoint(KINDS), "needs no exception any more"
        return
    asks = package_of(path) in {"scheduler", "runner", "attention", "models", "engine", "core"}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Constant):
            assert node.value not in KINDS, f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Attribute) and asks:
            assert node.attr != "kind", f"line {node.lineno}: a CacheGroup or a DeviceCache knows"


# Files that may ask whether a model has states of media, or a recurrent one, before there are cache groups.
ASKS_FOR_STATES = {
    "encoders/connect.py",
    "engine/core.py",
    "engine/ranks.py",
    "engine/setup.py",
    "inputs/media/processor.py",
    "inputs/prompt/encoder_prompt.py",
    "inputs/request_checks.py",
    "parallel/shared_items.py",
    "runner/build.py",
    "runner/memory_profile.py",
    "runner/runner.py",
    "tools/verify/reference.py",
}


def test_few_files_ask_for_states() -> None:
    """All else goes by what a cache group or a device's cache says."""
    asking = {
        str(path.relative_to(HOUSE))
        for path in FILES
        if not path.is_relative_to(HOUSE / "families")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("cross", "recurrent")
        and ast.unparse(node.value).endswith("info")
    }
    assert asking == ASKS_FOR_STATES


def test_no_private_places_in_the_repository() -> None:
    """No path of a developer's machine, no host of a package registry, no lock file, no profile that a run left."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    pattern = re.compile(
        "|".join(["/" + "work/", "/" + "root/", "/" + "opt/venv", "files.python" + "hosted", "pypi" + r"\.org"])
    )
    for line in listed.stdout.splitlines():
        path = ROOT / line
        assert not line.endswith((".lock", ".trace.json"))
        if path.suffix in (".py", ".md", ".toml", ".json", ".txt", ".jinja", ""):
            found = pattern.search(path.read_text(encoding="utf-8", errors="ignore")) if path.is_file() else None
            assert not found, f"{line} holds {found.group(0) if found else ''}"


def test_no_test_changes_the_clock_of_the_process() -> None:
    """Servers of other tests go by it; see tests/own_clock.py."""
    change = re.compile(r"setattr\((\w+\.)?time, |patch(\.object)?\([\"']?time\b")
    assert [path for path in ROOT.glob("tests/**/*.py") if change.search(path.read_text("utf-8"))] == []


def test_nothing_that_runs_write_is_in_the_repository() -> None:
    """What .gitignore names; profiles lie below the folder that a script runs in."""
    tracked = ["git", "ls-files", "-ci", "--exclude-standard"]
    listed = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    assert not listed.stdout
    subprocess.run(["git", "check-ignore", "-q", "vllm_profile/trace.json"], cwd=ROOT, check=True)


def test_importing_beheld_and_asking_for_help_loads_no_torch() -> None:
    code = "import sys, beheld; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (
        "import sys\nfrom beheld.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_command_imports_the_arguments_of_no_other() -> None:
    code = (
        "import sys\nfrom beheld.cli.main import main\n"
        "try:\n    main(['serve', '--help'])\nexcept SystemExit:\n    pass\n"
        "others = {'bench', 'batch', 'models', 'plan', 'verify', 'quantize', 'doctor', 'pull', 'chat', 'ask'}\n"
        "found = {name for name in others if f'beheld.cli.{name}' in sys.modules}\n"
        "assert 'beheld.cli.serve' in sys.modules and not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
