"""From a record to what the engine is asked: which column is the prompt, and with which parameters.

Owns columns and their meaning; a text made of several columns is `templates.py`'s matter. What a prompt or a
parameter may be is checked where it is used, in the frontend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenmill.batch.input_record import Record, Source, bad_parameters
from tokenmill.batch.json_lines import parse_json
from tokenmill.batch.templates import RowTemplate
from tokenmill.errors import InvalidArgument, RowError, did_you_mean
from tokenmill.sampling_params import brief, show

# Where the prompt is looked for when nobody says it, in this order.
PROMPT_COLUMNS = ("prompt", "messages", "input_ids", "text")
# Columns whose texts are JSON, because CSV has nothing but texts.
_JSON_COLUMNS = {"messages", "input_ids"}
# Formats in which all rows have the same keys at every depth, so that null says that a row has none.
_NULL_IS_ABSENT = {"parquet", "datasets"}
_SYSTEM_ROLES = ("system", "developer")


class RowMaker(Protocol):
    """Turns a record into what the engine is asked, an item of `Engine.iter`."""

    def item(self, record: Record) -> dict[str, Any] | RowError:
        """The item, or why there is none; the same for the same record, however often it is asked for."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """Which columns of a row say what. At most one of the first three is given."""

    prompt_column: str | None = None  # a text, a list of token ids, or a list of messages
    messages_column: str | None = None  # a list of messages, or such a list as JSON
    template: str | None = None  # a Jinja template of the columns, or the path of one
    system: str | None = None  # a message put before those of each row that has none of this role
    as_chat: bool = False  # a text is a message of the user, not the prompt itself
    tools_column: str | None = None  # for rows of messages; by default `tools`, where it is there
    params_column: str | None = None  # a dict; by default `sampling_params`, where it is there


class ColumnRows:
    """Makes items of records as a `RowForm` says."""

    def __init__(self, form: RowForm, source: Source) -> None:
        """Raises `InvalidArgument` for a form that contradicts itself or names columns the source has not."""
        ways = ("prompt_column", "messages_column", "template")
        given = [name for name in ways if getattr(form, name) is not None]
        if len(given) > 1:
            raise InvalidArgument(
                f"{' and '.join(given)} are given together; a prompt comes from one of them"
            )
        self._form = form
        self._template = None if form.template is None else RowTemplate(form.template)
        self._null_is_absent = source.format in _NULL_IS_ABSENT
        if source.columns is not None:
            self._check_columns(source.columns)

    @property
    def template_text(self) -> str | None:
        """The template itself, where one was given or named."""
        return None if self._template is None else self._template.text

    def item(self, record: Record) -> dict[str, Any] | RowError:
        """See `RowMaker`."""
        if record.fields is None:
            assert record.error is not None
            return record.error
        try:
            return self._item(record.fields)
        except InvalidArgument as error:
            return bad_parameters(f"{record.place}: {error}")

    def _item(self, fields: dict[str, Any]) -> dict[str, Any]:
        item = self._ask(*self._prompt(fields))
        is_chat = "messages" in item
        tools = self._tools(fields) if is_chat or self._form.tools_column is not None else None
        if tools and not is_chat:
            raise InvalidArgument(
                f"{self._form.tools_column} holds tools, which only a chat can use; give messages, or "
                "as_chat for texts of a user"
            )
        if tools:
            item["tools"] = tools
        params = self._given(_optional(fields, self._form.params_column, "sampling_params", dict))
        # Without parameters of its own, a row shares those of all, which are read once.
        return {**item, "sampling_params": params} if params else item

    def _tools(self, fields: dict[str, Any]) -> Any:
        return self._given(_optional(fields, self._form.tools_column, "tools", list))

    def _prompt(self, fields: dict[str, Any]) -> tuple[str, Any]:
        """The column that holds the prompt, or `template`, and what it holds."""
        if self._template is not None:
            return "template", self._template.render(fields)
        name = self._named
        if name is None:
            there = [name for name in PROMPT_COLUMNS if fields.get(name) is not None]
            if not there:
                raise _no_prompt(fields)
            # CSV has nothing but texts, and so no other way to leave one out.
            name = next((name for name in there if fields[name] != ""), there[0])
        elif name not in fields:
            raise _missing(name, fields)
        value = fields[name]
        is_json = name in _JSON_COLUMNS or name == self._form.messages_column
        return name, _from_json(name, value) if is_json and isinstance(value, str) else value

    @property
    def _named(self) -> str | None:
        """The column that is said to hold the prompt."""
        form = self._form
        return form.messages_column if form.prompt_column is None else form.prompt_column

    def _ask(self, name: str, value: Any) -> dict[str, Any]:
        """The part of an item that says what is to be completed."""
        form = self._form
        if isinstance(value, str):
            if not form.as_chat and form.system is None:
                return {"prompt": value}
            return {"messages": self._with_system([{"role": "user", "content": value}])}
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            return {"messages": self._with_system(self._given(value))}
        if not isinstance(value, list) or not value or not all(type(each) is int for each in value):
            raise InvalidArgument(
                f"{name} must be a text, a list of token ids or a list of messages, got {show(value)}"
            )
        if form.as_chat or form.system is not None:
            raise InvalidArgument(f"{name} holds token ids, which cannot be put into a chat; give a text")
        return {"input_ids": value}

    def _given(self, value: Any) -> Any:
        """What a row has of it: without the keys that only other rows have."""
        return _without_nulls(value) if self._null_is_absent else value

    def _with_system(self, messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        if self._form.system is None or messages[0].get("role") in _SYSTEM_ROLES:
            return messages
        return [{"role": "system", "content": self._form.system}, *messages]

    def _check_columns(self, columns: Sequence[str]) -> None:
        """Raise for columns that are named and that no row has."""
        form = self._form
        named = (form.prompt_column, form.messages_column, form.tools_column, form.params_column)
        for name in named:
            if name is not None and name not in columns:
                raise _missing(name, columns)
        if self._template is not None:
            for name in sorted(self._template.needed - {*columns}):
                raise InvalidArgument(
                    f"the template uses a column that is not there: {_missing(name, columns)}"
                )
        elif self._named is None and not set(PROMPT_COLUMNS) & set(columns):
            raise _no_prompt(columns)


def _without_nulls(value: Any) -> Any:
    """Plain data without keys whose value is None, at every depth; lists keep their items."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _optional(fields: dict[str, Any], named: str | None, usual: str, kind: type) -> Any:
    """The value of a column that rows need not have, from JSON where it is a text; None if there is none."""
    name = named or usual
    if named is not None and named not in fields:
        raise _missing(named, fields)
    value = fields.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = _from_json(name, value)
    if not isinstance(value, kind):
        wanted = "a dict" if kind is dict else "a list"
        raise InvalidArgument(f"{name} must be {wanted}, or one as JSON, got {show(value)}")
    return value


def _from_json(name: str, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InvalidArgument(f"{name}: {error}") from None


def _missing(name: str, columns: Sequence[str] | Mapping[str, Any]) -> InvalidArgument:
    hint = did_you_mean(name, columns)
    return InvalidArgument(f"there is no column {brief(name)}, only {_listed(columns)}.{hint}")


def _no_prompt(columns: Sequence[str] | Mapping[str, Any]) -> InvalidArgument:
    return InvalidArgument(
        f"there is no prompt: none of the columns {', '.join(PROMPT_COLUMNS)} holds anything, only "
        f"{_listed(columns)} are there; name one as prompt_column, or make a text of several with template"
    )


def _listed(columns: Sequence[str] | Mapping[str, Any]) -> str:
    names = [brief(name) for name in list(columns)[:20]]
    return ", ".join(names) + (", ..." if len(columns) > 20 else "") if names else "no columns at all"
