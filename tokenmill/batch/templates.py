"""Prompts made of several columns by a Jinja template, rendered in Jinja's sandbox.

A fault of the template itself is told at once, a column that one row lacks is told of that row. Jinja comes
with torch and is imported when the first template is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenmill.batch.json_text import json_bytes
from tokenmill.errors import InvalidArgument, did_you_mean, told
from tokenmill.sampling_params import brief, check_text, show

# All columns of the row as a dict, for names that are no identifiers: `{{ row["my column"] }}`.
_WHOLE_ROW = "row"
_ASKS_WHETHER_THERE = {"defined", "undefined", "default", "d"}


class RowTemplate:
    """A template whose variables are the columns of a row."""

    def __init__(self, template: str) -> None:
        """`template` is the text of a template or its path; raises `InvalidArgument` for its faults."""
        from jinja2 import TemplateSyntaxError

        self._environment: Any = _new_environment()
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


def _new_environment() -> Any:
    """Jinja's sandbox, in which nothing but data is written: a method's text would differ from run to run."""
    from jinja2 import StrictUndefined, Undefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    fail = Undefined._fail_with_undefined_error

    class Missing(StrictUndefined):
        __slots__ = ()
        __repr__ = fail  # what `pprint` and `%r` write

    class Null(Undefined):
        """A null has no text, like what is missing; a condition may ask for it as for None."""

        __slots__ = ()
        __hash__ = Undefined.__hash__
        __str__ = __repr__ = __iter__ = __len__ = __contains__ = fail

        def __eq__(self, other: object) -> bool:
            return is_null(other)

        @property
        def _undefined_message(self) -> str:
            return f"{self._undefined_name!r} is null"

    def is_null(value: object) -> bool:
        return value is None or isinstance(value, Null)

    class Environment(ImmutableSandboxedEnvironment):
        def given(self, name: Any, value: Any) -> Any:
            """What a template sees of a value that is there under a name."""
            if value is None:
                return Null(name=name)
            # The sandbox has to recognise the methods that format a text.
            is_method = callable(value) and not isinstance(value, Undefined)
            return _Method(value) if is_method and not _formats_text(value) else value

        def getattr(self, obj: Any, attribute: str) -> Any:
            return self.given(attribute, super().getattr(obj, attribute))

        def getitem(self, obj: Any, argument: Any) -> Any:
            return self.given(argument, super().getitem(obj, argument))

    def written(value: Any) -> Any:
        if value is None:
            raise InvalidArgument("it writes a null, which has no text")
        return value if isinstance(value, Undefined) else _data(value)

    def plain(value: Any) -> Any:
        """The value with None for nulls, at every depth."""
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return None if is_null(value) else value

    def to_json(value: Any, indent: int | None = None) -> str:
        return _to_json(plain(value), indent)

    environment = Environment(undefined=Missing, finalize=written)
    environment.filters["tojson"] = to_json
    environment.tests["none"] = is_null
    # The same row is to have the same prompt whenever it is read.
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


class _Method:
    """A method of data, which may be called, but has no text."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._method(*arguments, **named)

    def __repr__(self) -> str:
        raise _no_data(self._method)


def _formats_text(value: Any) -> bool:
    return isinstance(getattr(value, "__self__", None), str) and value.__name__ in ("format", "format_map")


def _data(value: Any) -> Any:
    """The value, if it is data at every depth."""
    kind = type(value)
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _data(item)
    elif isinstance(value, _Method):
        repr(value)
    elif callable(value) or isinstance(value, Iterator) or kind.__module__.startswith("jinja2."):
        raise _no_data(value)
    return value


def _no_data(value: Any) -> InvalidArgument:
    name = getattr(value, "__name__", type(value).__name__)
    return InvalidArgument(
        f"it writes {brief(name)}, which is no data but a part of a program; a column of such a name is "
        f"{_WHOLE_ROW}['name'], a key item['name']"
    )


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as models read it, and as outputs have it: Jinja's own would escape what HTML needs escaped."""
    return json.dumps(json.loads(json_bytes(_data(value))), ensure_ascii=False, indent=indent)
