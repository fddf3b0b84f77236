"""Jinja's sandbox, in which nothing but data is written: a method's text would differ from run to run.

Owns what a template sees of data, and what has a text. Imported with the first template, as Jinja is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jinja2 import StrictUndefined, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.batch.json_text import json_bytes
from tokenmill.errors import InvalidArgument
from tokenmill.sampling_params import brief

_fail = Undefined._fail_with_undefined_error


def new_environment() -> Environment:
    """An environment for templates of rows: the same row has the same prompt whenever it is read."""
    environment = Environment(undefined=Missing, finalize=_written)
    environment.filters["tojson"] = _to_json
    environment.tests["none"] = _is_null
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with methods that have no text, and nulls that have none."""

    def given(self, name: Any, value: Any) -> Any:
        """What a template sees of a value that is there under a name."""
        if value is None:
            return Null(name=name)
        # The sandbox has to recognise the methods that format a text.
        is_method = callable(value) and not isinstance(value, Undefined)
        return _Method(value) if is_method and not _formats_text(value) else value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See Jinja."""
        return self.given(attribute, super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See Jinja."""
        return self.given(argument, super().getitem(obj, argument))


class Missing(StrictUndefined):
    """What is not there, and so has no text, whoever asks for it."""

    __slots__ = ()
    __repr__ = _fail  # what `pprint` and `%r` write


class Null(Undefined):
    """A null has no text, like what is missing; a condition may ask for it as for None."""

    __slots__ = ()
    __hash__ = Undefined.__hash__
    __str__ = __repr__ = __iter__ = __len__ = __contains__ = _fail

    def __eq__(self, other: object) -> bool:
        return _is_null(other)

    @property
    def _undefined_message(self) -> str:
        return f"{self._undefined_name!r} is null"


def _is_null(value: object) -> bool:
    return value is None or isinstance(value, Null)


def _written(value: Any) -> Any:
    if value is None:
        raise InvalidArgument("it writes a null, which has no text")
    return value if isinstance(value, Undefined) else _data(value)


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
        "row['name'], a key item['name']"
    )


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as models read it, and as outputs have it: Jinja's own would escape what HTML needs escaped."""
    return json.dumps(json.loads(json_bytes(_data(_plain(value)))), ensure_ascii=False, indent=indent)


def _plain(value: Any) -> Any:
    """The value with None for nulls, at every depth."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if _is_null(value) else value
