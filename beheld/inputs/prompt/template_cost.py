"""Whether anything in a chat template can take long or make much of little, judged by its source alone.

What passes is rendered in this process. What does not pass need not be hostile: it is rendered in the sandbox.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Entries of messages and what they hold, as a loop over them is counted, and of `range`, of which Jinja allows no more.
_DATA = 8
_RANGE = 100_000
_MAX_STEPS = 1_000_000
_MAX_LETTERS = 1 << 26
_SHORT = 1000
_FILTERS = frozenset(
    {
        *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape"),
        *("first", "float", "groupby", "int", "items", "join", "last", "length"),
        *("list", "lower", "map", "max", "min", "reject", "rejectattr", "replace"),
        *("reverse", "round", "safe", "select", "selectattr", "sort", "string", "title"),
        *("tojson", "trim", "unique", "upper"),
    }
)
_METHODS = frozenset(
    {
        *("capitalize", "count", "endswith", "find", "get", "index", "isdigit", "items"),
        *("join", "keys", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace"),
        *("rfind", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"),
        *("title", "upper", "values"),
    }
)
_FUNCTIONS = frozenset(("namespace", "raise_exception", "dict"))


class _UnboundedError(Exception):
    """Something in the template has no bound that can be seen."""


def is_bounded(source: str) -> bool:
    """True if rendering `source` takes a moment, whatever a conversation of the usual size holds.

    A template that is none is bounded: it fails at once.
    """
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag of transformers around what the model says."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            number = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=number)

    try:
        tree = ImmutableSandboxedEnvironment(extensions=[Generation, "jinja2.ext.loopcontrols"]).parse(source)
        _Judge(tree).check()
    except TemplateSyntaxError:
        return True
    except (_UnboundedError, RecursionError):
        return False
    return True


class _Judge:
    """Counts the steps of loops and macros, and how large texts may grow."""

    def __init__(self, tree: Any) -> None:
        from jinja2 import nodes

        self._nodes = nodes
        self._tree = tree
        self._macros: Mapping[str, Any] = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        self._costs: dict[str, int] = {}
        self._open: list[str] = []
        self._growth = 1.0
        # The longest text or list that stands in the source.
        self._longest = max(map(_size, tree.find_all((nodes.Const, nodes.List, nodes.TemplateData))), default=1)

    def check(self) -> None:
        """Raise _UnboundedError if something is not bounded."""
        if len(self._macros) != len(list(self._tree.find_all(self._nodes.Macro))):
            raise _UnboundedError
        for node in self._tree.find_all(self._nodes.Node):
            self._check_node(node)
        lasting = self._lasting()
        for loop in self._tree.find_all(self._nodes.For):
            for assign in loop.find_all(self._nodes.Assign):
                names = [name.name for name in assign.node.find_all(self._nodes.Name)]
                if isinstance(assign.target, self._nodes.NSRef) and sum(name in lasting for name in names) > 1:
                    # It doubles from one entry to the next.
                    raise _UnboundedError
        if self._growth * max(1, self._longest) > _MAX_LETTERS:
            raise _UnboundedError
        if self._steps(self._tree.body) > _MAX_STEPS:
            raise _UnboundedError

    def _lasting(self) -> set[str]:
        """Variables that last from one entry of a loop to the next, which are those of namespaces, and their copies."""
        nodes = self._nodes
        lasting = {reference.name for reference in self._tree.find_all(nodes.NSRef)}
        assigned = list(self._tree.find_all((nodes.Assign, nodes.AssignBlock)))
        before = -1
        while len(lasting) != before:
            before = len(lasting)
            for assign in assigned:
                inside = [assign.node] if isinstance(assign, nodes.Assign) else assign.body
                names = {name.name for node in inside for name in (*node.find_all(nodes.Name), node) if _is_name(name)}
                if names & lasting:
                    lasting |= {target.name for target in _targets(assign.target)}
        return lasting

    def _check_node(self, node: Any) -> None:
        nodes = self._nodes
        if isinstance(node, nodes.Pow | nodes.CallBlock | nodes.Include | nodes.Import | nodes.Extends):
            raise _UnboundedError
        if isinstance(node, nodes.Mul) and not (_small(node.left) or _small(node.right)):
            raise _UnboundedError
        if isinstance(node, nodes.Mul):
            self._growth *= _SHORT
        if isinstance(node, nodes.Mod) and not self._counts(node.left):
            # Texts know the operator as well, with any width.
            raise _UnboundedError
        if isinstance(node, nodes.Filter):
            self._check_call(node.name, node, node.name in _FILTERS)
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            self._check_call(node.node.attr, node, node.node.attr in _METHODS)
        elif isinstance(node, nodes.Call):
            name = node.node.name if isinstance(node.node, nodes.Name) else ""
            now = name == "strftime_now" and all(isinstance(arg, nodes.Const) and _size(arg) < 64 for arg in node.args)
            if not (now or name in _FUNCTIONS or name == "range" or name in self._macros):
                raise _UnboundedError
        if isinstance(node, nodes.Assign | nodes.AssignBlock):
            inside = [node.node] if isinstance(node, nodes.Assign) else node.body
            self._growth *= max(1, sum(map(self._mentions, inside)))

    def _check_call(self, name: str, node: Any, known: bool) -> None:
        """A filter or a method, and of those that put something in place of something else what that is."""
        values = [*node.args, *(keyword.value for keyword in node.kwargs)]
        if not known:
            raise _UnboundedError
        plain = [isinstance(value, self._nodes.Const) and not isinstance(value.value, int | float) for value in values]
        if name == "tojson" and not all(
            is_text or _small(value, 8) for is_text, value in zip(plain, values, strict=True)
        ):
            raise _UnboundedError
        if name == "join":
            texts = values if isinstance(node, self._nodes.Filter) else [node.node.node]
            if not all(isinstance(text, self._nodes.Const) and _size(text) <= 64 for text in texts[:1]):
                raise _UnboundedError
        if name == "replace":
            if len(values) < 2 or not all(isinstance(value, self._nodes.Const) for value in values):
                raise _UnboundedError
            self._growth *= max(1.0, (_size(values[1]) + 1) / max(1, _size(values[0])))

    def _mentions(self, value: Any) -> int:
        """How often a value joins what was computed before: each variable may be as long as all others."""
        nodes = self._nodes
        joined = (nodes.Add, nodes.Concat, nodes.List, nodes.Tuple, nodes.Dict, nodes.Output, nodes.Mul)
        if not isinstance(value, joined) and value.find(joined) is None:
            return 0
        names = [name.name for name in value.find_all(nodes.Name) if name.ctx == "load"]
        return sum(name not in ("loop", "message", "messages") and name not in self._macros for name in names) + (
            isinstance(value, nodes.Name)
        )

    def _counts(self, value: Any) -> bool:
        """True if a value is a number: a loop's, a length, or what is computed of these."""
        nodes = self._nodes
        if isinstance(value, nodes.Const):
            return isinstance(value.value, int)
        if isinstance(value, nodes.Filter):
            return value.name in ("length", "count", "int")
        if isinstance(value, nodes.Getattr):
            return isinstance(value.node, nodes.Name) and value.node.name == "loop"
        return isinstance(value, nodes.Add | nodes.Sub) and self._counts(value.left) and self._counts(value.right)

    def _steps(self, body: Iterable[Any]) -> int:
        nodes = self._nodes
        total = 1
        for node in body:
            if isinstance(node, nodes.Macro):
                continue
            if isinstance(node, nodes.For):
                if node.recursive:
                    raise _UnboundedError
                inner = self._steps([*node.body, *node.else_, *([node.test] if node.test is not None else [])])
                total += self._entries(node.iter) * inner + self._steps([node.iter])
                continue
            if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name in self._macros:
                total += self._macro(node.node.name, node)
            total += self._steps(node.iter_child_nodes()) - 1
            if total > _MAX_STEPS:
                raise _UnboundedError
        return total

    def _macro(self, name: str, call: Any) -> int:
        """The steps of a macro; one that calls itself has to go down into what it was given, and no further."""
        nodes = self._nodes
        if name in self._open:
            given = [*call.args, *(keyword.value for keyword in call.kwargs)]
            counting = (nodes.BinExpr, nodes.Call, nodes.Filter, nodes.Slice, nodes.Concat, nodes.CondExpr)
            if any(isinstance(arg, counting) or arg.find(counting) is not None for arg in given):
                raise _UnboundedError
            if any(self._macros[each].find(nodes.NSRef) is not None for each in self._open):
                raise _UnboundedError
            return _DATA
        if name not in self._costs:
            self._open.append(name)
            self._costs[name] = self._steps(self._macros[name].body)
            self._open.pop()
        return self._costs[name]

    def _entries(self, value: Any) -> int:
        """How many entries a loop goes through."""
        nodes = self._nodes
        if isinstance(value, nodes.Const | nodes.List | nodes.Tuple | nodes.Dict):
            return max(1, _size(value))
        if isinstance(value, nodes.Call) and isinstance(value.node, nodes.Name) and value.node.name == "range":
            numbers = [arg.value if isinstance(arg, nodes.Const) else None for arg in value.args]
            if all(isinstance(number, int) for number in numbers):
                return min(_RANGE, max((abs(number) for number in numbers if number is not None), default=1))
            return _DATA if all(map(self._counts, value.args)) else _RANGE
        names = [name.name for name in value.find_all(nodes.Name)] + ([value.name] if _is_name(value) else [])
        if any(name in self._literals for name in names):
            return max(_DATA, self._longest)
        return _DATA

    @property
    def _literals(self) -> frozenset[str]:
        """Variables that are set to a text or a list of the source."""
        nodes = self._nodes
        long = [
            assign
            for assign in self._tree.find_all(nodes.Assign)
            if any(_size(node) > _DATA for node in (assign.node, *assign.node.find_all((nodes.Const, nodes.List))))
        ]
        return frozenset(name.name for assign in long for name in _targets(assign.target))


def _targets(target: Any) -> list[Any]:
    if _is_name(target) or type(target).__name__ == "NSRef":
        return [target]
    return [entry for entry in getattr(target, "items", ()) if _is_name(entry)]


def _is_name(node: Any) -> bool:
    return type(node).__name__ == "Name"


def _size(node: Any) -> int:
    """Letters or entries of what stands in the source; 0 for all else."""
    value = getattr(node, "value", None) if type(node).__name__ == "Const" else None
    if isinstance(value, str):
        return len(value)
    if type(node).__name__ == "TemplateData":
        return len(node.data)
    items = getattr(node, "items", None)
    return len(items) if isinstance(items, list | tuple) else 0


def _small(node: Any, most: int = _SHORT) -> bool:
    value = getattr(node, "value", None) if type(node).__name__ == "Const" else None
    return isinstance(value, int | float) and -most <= value <= most
