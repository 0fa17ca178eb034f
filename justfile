# Recipes of this project. `just --list` shows them; each is one line that can be run without just.

# All tests on the CPU in three processes, or those of the arguments in one: just test tests/scheduler -x
test *arguments:
    pytest {{ if arguments == "" { "-n 3" } else { arguments } }}

# Style.
lint:
    ruff check . && ruff format --check .

# Mend what can be mended.
format:
    ruff check --fix . && ruff format .

# Types, strict.
types:
    mypy

# The site, with strict links, into build/site.
docs:
    NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# The site while you write, at http://127.0.0.1:8010.
docs-serve:
    mkdocs serve -a 127.0.0.1:8010

# Run every command of pages: just follow docs/how-to/video.md
follow +pages:
    python -m tests.examples.follow {{pages}}

# The tables of the reference that are made from the code, and the page of models.
tables:
    python -m tests.server.flag_table && python -m tests.server.cases > docs/reliability.md && beheld models --markdown > docs/models.md

# The largest files and functions: a signal, not a rule.
size number="15":
    python -m tests.size {{number}}

# The quick benchmarks.
bench:
    python -m benchmarks.scheduler && python -m benchmarks.preprocessing && python -m benchmarks.startup

# What CI runs, in a fresh environment.
ci:
    .ci/run

# Other projects' clients (langchain, llama-index, litellm, instructor, llm, lm-evaluation-harness), over this environment.
clients:
    .ci/clients "$(python -c 'import sys; print(sys.prefix)')"

# The versions that CI tests with, from this environment.
constraints:
    (echo "# Versions that CI tests with; just constraints writes them anew." && pip freeze --exclude-editable) > .ci/constraints.txt
