"""The import hook: it makes modules named `vllm...` from the table of names and refuses any name not in it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from beheld.compat.names import ABSENT, MODULES, PROGRAMS
from beheld.core.value_checks import nearest

ROOT = "vllm"


class AliasModule(ModuleType):
    """A module that imports each of its names from beheld on first use."""

    def __getattr__(self, name: str) -> Any:
        home = MODULES[self.__name__].get(name)
        below = f"{self.__name__}.{name}"
        if home is None and below in MODULES:
            # `import vllm` loads most of its modules, and scripts go on to `vllm.outputs`.
            return importlib.import_module(below)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}. {_offer(self.__name__, name)}")
        module, _, attribute = home.partition(":")
        value = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        below = self.__name__ + "."
        inner = [m.removeprefix(below) for m in MODULES if m.startswith(below) and "." not in m.removeprefix(below)]
        return sorted({*MODULES[self.__name__], *inner})


class AliasFinder(MetaPathFinder, Loader):
    """Finds `vllm` and its submodules in the table and creates them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in the table; None for modules outside vllm.

        Raises:
            ModuleNotFoundError: a vllm module or name that beheld does not have. Python looks for the submodule
                `vllm.x.y` when `from vllm.x import y` finds no such name, so a missing name raises here too.
        """
        if fullname != ROOT and not fullname.startswith(ROOT + "."):
            return None
        if fullname in MODULES:
            # All but programs are packages: some of vllm's modules became packages, and scripts use both forms.
            return ModuleSpec(fullname, self, origin=fullname, is_package=fullname not in PROGRAMS)
        home, _, name = fullname.rpartition(".")
        raise ModuleNotFoundError(f"{fullname!r} has no counterpart in beheld. {_offer(home, name)}")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create an empty module; its names are resolved on demand."""
        return AliasModule(spec.name, f"beheld's counterpart of {spec.name}.")

    def get_code(self, fullname: str) -> CodeType:
        """What `python -m` runs: a command of beheld's, in the first process only."""
        words = PROGRAMS[fullname]
        command = f"sys.argv[:1] = ['beheld', *{words!r}]\n    command()"
        imports = "import sys\n    from beheld.cli.main import command"
        return compile(f"if __name__ == '__main__':\n    {imports}\n    {command}\n", fullname, "exec")

    def exec_module(self, module: ModuleType) -> None:
        """Set `__all__`, for `from vllm import *`."""
        module.__dict__["__all__"] = sorted(name for name in MODULES[module.__name__] if not name.startswith("__"))


def install() -> None:
    """Make `import vllm` give beheld in this process, even if vllm is installed. Idempotent.

    Raises:
        ImportError: the real vllm is already imported.
    """
    found = sys.modules.get(ROOT)
    if found is not None and not isinstance(found, AliasModule):
        raise ImportError("vllm itself was imported before beheld.compat.vllm; import beheld.compat.vllm first.")
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())


def uninstall() -> None:
    """Undo `install`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AliasFinder)]
    for name in [name for name, module in sys.modules.items() if isinstance(module, AliasModule)]:
        del sys.modules[name]


def _offer(home: str, name: str) -> str:
    """Suggest alternatives: a known one, other modules with that name, the names in that module, or all modules."""
    dotted = f"{home}.{name}"
    reasons = [why for absent, why in ABSENT.items() if f"{dotted}.".startswith(f"{absent}.")]
    if reasons:
        return reasons[0]
    homes = [module for module, names in MODULES.items() if name in names]
    if homes:
        return f"There is {homes[0]}.{name}."
    names = [offered for offered in MODULES.get(home, {}) if not offered.startswith("__")]
    close = nearest(name, names)
    below = sorted(names) or sorted(m for m in MODULES if m.startswith(home + "."))
    if below:
        return (close + " " if close else "") + f"{home} offers: {', '.join(below)}."
    return f"Modules that have one: {', '.join(sorted(m for m, names in MODULES.items() if names))}."
