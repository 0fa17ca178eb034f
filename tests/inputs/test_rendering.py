"""Templates of strangers are rendered as the operator's are, but where they can be killed, and open nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from beheld.core.errors import TemplateError
from beheld.core.request import ForeignTemplate
from beheld.inputs.pipeline import Chat, InputPipeline, RequestOrder
from beheld.inputs.prompt.rendering import MAX_S
from tests.inputs import pipes

FAMILY = "qwen2"
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ bos_token or '' }}\n{% endfor %}{{ extra }}"
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi <|im_end|> there"},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="module")
def pipe() -> Iterator[InputPipeline]:
    made = pipes.make(FAMILY, {"media_workers": 1})
    made.prepare(
        RequestOrder(Chat(TALK[:1], chat_template=ForeignTemplate("{{ messages }}")), pipes.ONE_TOKEN, request_id="0")
    )
    yield made
    made.close()


def rendered(pipe: InputPipeline, template: str, **options: Any) -> str | None:
    return pipe.prepare(
        RequestOrder(Chat(TALK, chat_template=template, **options), pipes.ONE_TOKEN, request_id="0")
    ).prompt


def test_49_what_is_written_is_the_same_wherever_it_is_rendered(pipe: InputPipeline) -> None:
    for options in ({}, {"template_kwargs": {"extra": "more <|im_end|>"}}):
        assert rendered(pipe, ForeignTemplate(PLAIN), **options) == rendered(pipe, PLAIN, **options)
    assert rendered(pipe, ForeignTemplate(PLAIN)) == rendered(pipes.shared(FAMILY), ForeignTemplate(PLAIN))


BOMBS = {
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "one string": "{{ 'a' * 2000000000 }}",
    "more than 1 MiB": "{% for a in range(2000) %}{{ 'a' * 1000 }}{% endfor %}",
    "deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "a recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a format": "{{ '%99999999999d' % 1 }}",
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_49_bombs_are_stopped(pipe: InputPipeline, name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(TemplateError):
        rendered(pipe, ForeignTemplate(BOMBS[name]))
    assert time.monotonic() - begin < MAX_S + 1
    assert "Bye" in (rendered(pipe, ForeignTemplate(PLAIN)) or "")


ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "self": "{{ self._TemplateReference__context.cycler.__init__.__globals__ }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "extends": "{% extends '/etc/passwd' %}",
    "changing": "{{ messages.append(1) }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
}


@pytest.mark.parametrize("name", sorted(ESCAPES))
def test_49_50_nothing_leads_out_of_a_template(pipe: InputPipeline, name: str) -> None:
    for where, template in ((pipe, ForeignTemplate(ESCAPES[name])), (pipes.shared(FAMILY), ESCAPES[name])):
        with pytest.raises(TemplateError):
            rendered(where, template)


def test_49_a_strangers_template_is_never_a_file(pipe: InputPipeline, tmp_path: Any) -> None:
    path = tmp_path / "secret.jinja"
    path.write_text("{{ 'of the operator' }}{{ messages[0].content }}")
    assert "of the operator" in (rendered(pipe, str(path)) or "")
    assert rendered(pipe, ForeignTemplate(str(path))) == str(path)


AUDIT = """
import sys
from tests.inputs import pipes
from tests.inputs.test_rendering import ESCAPES, TALK
from beheld.core.errors import TemplateError
from beheld.inputs.pipeline import Chat, RequestOrder
pipe = pipes.make("qwen2")
def ask(template):
    pipe.prepare(RequestOrder(Chat(TALK, chat_template=template), pipes.ONE_TOKEN, "0"))
ask("{{ messages }}")
seen = []
def hook(event, arguments):
    if event in ("open", "os.system", "subprocess.Popen", "socket.connect", "os.exec", "os.posix_spawn"):
        seen.append((event, arguments))
sys.addaudithook(hook)
for template in ESCAPES.values():
    try:
        ask(template)
    except TemplateError:
        continue
    raise SystemExit(f"went through: {template}")
print([entry for entry in seen if not str(entry[1][0]).endswith((".py", ".pyc"))])
"""


def test_50_a_models_own_template_opens_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", AUDIT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.case(105)
@pytest.mark.parametrize(
    "template", ["{% break %}", "{% continue %}", "{% for a in [1] %}" * 100 + "x" + "{% endfor %}" * 100]
)
def test_templates_that_python_does_not_take_are_refused(pipe: InputPipeline, template: str) -> None:
    """They were errors of the server's."""
    for given in (ForeignTemplate(template), template):
        with pytest.raises(TemplateError, match="cannot be translated") as caught:
            rendered(pipe, given)
        assert caught.value.param == "chat_template"
