"""Which chat templates are rendered in the engine's own process, and which only where they can be stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from beheld import mote
from beheld.inputs.prompt.template_cost import is_bounded
from tests import tiny_text

# What published templates do: macros, a macro that goes down into a schema, namespaces, slices, reasoning cut off.
USUAL = r"""
{%- macro shown(schema) -%}
  {%- if schema is mapping -%}{%- for key, value in schema|dictsort -%}
    {{- key ~ ': ' }}{%- if value is mapping -%}{{ shown(value) }}{%- else -%}{{ value|tojson }}{%- endif -%}
  {%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- macro content_of(content) -%}
  {%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}
    {%- if part.type == 'image' -%}{{ '<|image|>' }}{%- else -%}{{ part.text|trim }}{%- endif -%}
  {%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=messages|length - 1, system='') -%}
{%- for message in messages[::-1] -%}
  {%- set index = (messages|length - 1) - loop.index0 -%}
  {%- if message.role == 'user' and not message.content.startswith('<tool>') -%}{%- set ns.last = index -%}{%- endif -%}
{%- endfor -%}
{%- for tool in tools or [] -%}
  {{ tool.function.name ~ shown(tool.function.parameters) ~ tool|tojson(indent=4) }}
{%- endfor -%}
{%- for message in messages[1:] -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('Roles must alternate.') }}
  {%- endif -%}
  {%- set reasoning, content = '', content_of(message.content) -%}
  {%- if '</think>' in content -%}
    {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
    {%- set content = content.split('</think>')[-1] -%}
  {%- endif -%}
  {%- set ns.system = ns.system + content -%}
  {%- generation -%}{{ '<|' + message.role + '|>' + reasoning + content|replace('<|', '< |') }}{%- endgeneration -%}
  {%- for call in message.tool_calls or [] -%}{%- for name, value in call.function.arguments|items -%}
    {{ name ~ '=' ~ (value|tojson if value is mapping else value|string) }}
  {%- endfor -%}{%- endfor -%}
  {%- if loop.last -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{{- strftime_now('%d %b %Y') }}{%- if add_generation_prompt -%}{{ '-' * 20 }}{%- endif -%}
"""
LONG_TEMPLATES = {
    "loops over numbers": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a variable": "{% set n = 9999 %}{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}",
    "a list's powers": "{% set l = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] %}" + "{% for a in l %}" * 9 + "{% endfor %}" * 9,
    "the messages' powers": "{% for a in messages %}" * 15 + "{% endfor %}" * 15,
    "recursion by number": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "recursion by slice": "{% macro f(s) %}{% if s %}{{ f(s[1:]) }}{{ f(s[1:]) }}{% endif %}{% endmacro %}{{ f('a') }}",
    "a recursive loop": "{% for c in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    "macros that double": "".join(
        f"{{% macro f{i}() %}}{{{{ f{i + 1}() }}}}{{{{ f{i + 1}() }}}}{{% endmacro %}}" for i in range(40)
    )
    + "{% macro f40() %}x{% endmacro %}{{ f0() }}",
    "texts that double": "{% set x = 'ab' %}" + "{% set x = x + x %}" * 40,
    "texts that double by ~": "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 40,
    "blocks that double": "{% set x %}ab{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "texts that double in a loop": "{% set ns = namespace(x='a') %}{% for m in messages %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a copy that doubles": "{% set ns = namespace(x='a') %}{% for m in messages %}"
    "{% set t = ns.x %}{% set ns.x = t ~ t %}{% endfor %}",
    "lists that double": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 40,
    "letters replaced by more": "{% set x = 'a' %}" + "{% set x = x|replace('a', 'aaaaaaaaaa') %}" * 40,
    "a product": "{{ 'a' * 10 ** 9 }}",
    "a large product": "{{ 'a' * 999999999 }}",
    "a width": "{{ 'a'|center(999999999) }}",
    "a width by %": "{{ '%0999999999d' % 1 }}",
    "a width by format": "{{ '{:>999999999}'.format(1) }}",
    "an indent": "{{ [1]|tojson(indent=999999999) }}",
    "filler": "{{ lipsum(n=99999) }}",
}


@pytest.mark.parametrize("name", LONG_TEMPLATES)
def test_what_may_take_long_is_told(name: str) -> None:
    assert not is_bounded(LONG_TEMPLATES[name])


def test_what_published_templates_do_is_bounded() -> None:
    assert is_bounded(USUAL)


def test_all_templates_that_we_bring_are_bounded() -> None:
    files = [*mote.path().glob("*.jinja"), *(mote.path().parent / "families").glob("*/*.jinja")]
    assert len(files) > 5
    texts = [getattr(tiny_text, name) for name in dir(tiny_text) if name.endswith("_CHAT")]
    assert all(is_bounded(text) for text in (*texts, *(Path(file).read_text() for file in files)))


def test_what_is_no_template_fails_at_once_and_needs_no_sandbox() -> None:
    assert is_bounded("{% for %}")
