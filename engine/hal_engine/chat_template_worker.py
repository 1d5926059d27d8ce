"""The process that renders chat templates: sandboxed, limited in memory, killable.

A template comes with a model and is a program: it can loop for ever or ask for any amount of
memory, also in one operation of the interpreter that nothing inside the process can stop. So it
runs in its own process, which the parent ends at a deadline.

Protocol: one JSON object a line on stdin, one a line on stdout. {"template": …} compiles and keeps
a template; {"variables": …} renders it. Answers: {"text": …} or {"error": …}.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_MEMORY_BYTES = 768 * 2**20  # of address space; the interpreter itself takes about 100 MiB
MAX_TEXT_CHARS = 16 * 2**20


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way to declare tags

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter: models are trained on plain JSON."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def create_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that published chat templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    stream: Iterator[str] = template.generate(**variables)
    for piece in stream:
        size += len(piece)
        if size > MAX_TEXT_CHARS:
            raise jinja2.TemplateError(f"the rendered text is longer than {MAX_TEXT_CHARS}")
        pieces.append(piece)
    return "".join(pieces)


def main() -> None:
    """Serves requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environment = create_environment()
    template = environment.from_string("")
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, str]
        try:
            if "template" in request:
                template = environment.from_string(request["template"])
                answer = {"text": ""}
            else:
                answer = {"text": _render(template, request["variables"])}
        except MemoryError:
            answer = {"error": "it asks for too much memory"}
        except RecursionError:
            answer = {"error": "it calls itself without end"}
        except Exception as error:  # noqa: BLE001 - a template can raise anything; the parent is told
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
