"""Prompts made of several columns by a Jinja template, rendered in Jinja's sandbox.

A fault of the template itself is told at once, a column that one row lacks is told of that row. What may be
written is `sandbox.py`'s matter. Jinja comes with torch and is imported when the first template is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenmill.errors import InvalidArgument, did_you_mean, told
from tokenmill.sampling_params import check_text, show

# All columns of the row as a dict, for names that are no identifiers: `{{ row["my column"] }}`.
_WHOLE_ROW = "row"
_ASKS_WHETHER_THERE = {"defined", "undefined", "default", "d"}


class RowTemplate:
    """A template whose variables are the columns of a row."""

    def __init__(self, template: str) -> None:
        """`template` is the text of a template or its path; raises `InvalidArgument` for its faults."""
        from jinja2 import TemplateSyntaxError

        from tokenmill.batch.sandbox import new_environment

        self._environment = new_environment()
        self.text = _source(template)
        try:
            self._template = self._environment.from_string(self.text)
        except TemplateSyntaxError as error:
            raise InvalidArgument(f"the template is faulty in line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, MemoryError):  # limits of Python, which compiles it
            raise InvalidArgument("the template is nested too deeply; make it flatter") from None
        if (word := _other_template(self._environment.parse(self.text))) is not None:
            raise InvalidArgument(f"the template has {{% {word} %}}, but there are no others; write it out")

    @cached_property
    def needed(self) -> frozenset[str]:
        """The columns without which no row can be rendered: those it never asks whether they are there."""
        from jinja2 import meta

        tree = self._environment.parse(self.text)
        names = meta.find_undeclared_variables(tree) - self._environment.globals.keys()
        return frozenset(names - {_WHOLE_ROW} - set(_asked_for(tree)))

    def render(self, fields: Mapping[str, Any]) -> str:
        """The text for one row; raises `InvalidArgument` for whatever goes wrong in it."""
        from jinja2 import UndefinedError

        try:
            columns = {name: self._environment.given(name, value) for name, value in fields.items()}
            text: str = self._template.render({_WHOLE_ROW: fields, **columns})
            return text
        except UndefinedError as error:
            name = str(error.message).split("'")[1] if "'" in str(error.message) else ""
            hint = "" if name in fields else did_you_mean(name, fields)
            raise InvalidArgument(
                f"the template needs what the row has not: {error.message}.{hint}"
            ) from None
        except InvalidArgument as error:
            raise InvalidArgument(f"the template cannot be rendered: {error}") from None
        except Exception as error:  # a template is a program, and may fail in any way
            raise InvalidArgument(f"the template cannot be rendered: {told(error)}") from None


def _source(template: str) -> str:
    """The text of the template: as given, or from the file it names."""
    text = check_text("template", template)
    if "{{" in text or "{%" in text:
        return text
    try:
        text = Path(text).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"template must be a Jinja template like 'Summarize: {{{{ text }}}}' or the path of one, got "
            f"{show(template)}: {error}"
        ) from None
    if "{{" not in text and "{%" not in text:
        raise InvalidArgument(
            f"the template {show(template)} uses no column, so that all prompts would be the same; write "
            "{{ column }} where a column is to stand"
        )
    return text


def _asked_for(tree: Any) -> Iterator[str]:
    """Names of variables that a template asks whether they are there, or has a default for."""
    from jinja2 import nodes

    for node in tree.find_all((nodes.Test, nodes.Filter)):
        if node.name in _ASKS_WHETHER_THERE and isinstance(node.node, nodes.Name):
            yield node.node.name


def _other_template(tree: Any) -> str | None:
    """The word by which a template refers to another one; None if it does not."""
    from jinja2 import nodes

    words = {nodes.Include: "include", nodes.Extends: "extends", nodes.Import: "import"}
    words[nodes.FromImport] = "from"
    return next((words[type(node)] for node in tree.find_all(tuple(words))), None)
