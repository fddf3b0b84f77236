"""Flags of the command line, made from the fields of a configuration: names, types, choices, help, defaults.

What they mean is decided where the fields are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.sampling_params import SamplingParams

# Fields that make no sense for our command: it prints text, and prints it piece by piece itself.
NO_COMMAND_FLAG = {
    "skip_tokenizer_init",
    "cumulative_stream",
    "preferred_sampling_params",
    "logprobs_ignore_temperature",
}
# The engine's flag of the same name serves both; there are no logit processors here to read the others.
_NO_SAMPLING_FLAG = {"stream_interval", "custom_params"}
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


def add_engine_flags(
    parser: argparse.ArgumentParser,
    *,
    without: Iterable[str] = NO_COMMAND_FLAG,
    helps: Mapping[str, str] = _NOTHING,
) -> None:
    """The arguments of `Engine`, as `engine.<name>` in the options; `helps` as in `add_flags`."""
    group = parser.add_argument_group("engine")
    # Not argparse's choices: the words of SGLang for them are taken, too.
    names = {"model_path": ("--model",)}
    add_flags(group, EngineConfig, "engine", without=without, names=names, helps=helps)


def add_hidden_engine_flags(
    parser: argparse.ArgumentParser, examples: Mapping[str, Sequence[object]], *, lists: Collection[str]
) -> None:
    """More arguments of `Engine`, without help. Examples tell the type of a value; `lists` have several."""
    for name, values in examples.items():
        kind = next((type(value) for value in values if value is not None), str)
        parsing: dict[str, Any] = {"type": kind if kind in (int, float) else str}
        if kind is bool:
            parsing = {"action": "store_true"}
        elif name in lists:
            parsing["nargs"] = "+"
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, dest=f"engine.{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **parsing
        )


def add_sampling_flags(parser: argparse.ArgumentParser, *, without: Iterable[str] = ()) -> None:
    """The sampling parameters, as `sampling.<name>` in the options."""
    group = parser.add_argument_group("sampling")
    unsupported = {f.name for f in dataclasses.fields(SamplingParams) if not f.metadata["supported"]}
    add_flags(group, SamplingParams, "sampling", without={*unsupported, *_NO_SAMPLING_FLAG, *without})


def add_flags(
    group: argparse._ArgumentGroup,
    described: type[Any],
    prefix: str,
    *,
    without: Iterable[str],
    names: Mapping[str, tuple[str, ...]] = _NOTHING,
    helps: Mapping[str, str] = _NOTHING,
) -> None:
    """A flag for each field; what the user does not give stays absent from the options.

    `helps` stands in place of the help of fields whose default is another one for the command.
    """
    hints = typing.get_type_hints(described)
    for field in dataclasses.fields(described):
        if field.name in without:
            continue
        flags = (*names.get(field.name, ()), "--" + field.name.replace("_", "-"))
        group.add_argument(
            *flags,
            dest=f"{prefix}.{field.name}",
            default=argparse.SUPPRESS,
            help=helps.get(field.name, field.metadata["help"] + _default_text(field)).replace("%", "%%"),
            **_parsing(
                field.name,
                hints[field.name],
                field.metadata.get("choices"),
                are_all=described is not EngineConfig,
            ),
        )


def _default_text(field: dataclasses.Field[Any]) -> str:
    shown = isinstance(field.default, (str, int, float)) and not isinstance(field.default, bool)
    return f" (default: {field.default})" if shown else ""


def _parsing(name: str, hint: Any, choices: Sequence[str] | None, *, are_all: bool) -> dict[str, Any]:
    """How argparse reads the value of a field of this name and type; `are_all`: no other word is taken."""
    members = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    plain = members - {types.NoneType}
    if choices:
        return {"choices": choices} if are_all else {"metavar": "{" + ",".join(choices) + "}"}
    if plain == {bool}:
        # argparse takes every flag that starts with --no- for the opposite of another one.
        return {"action": "store_true" if name.startswith("no_") else argparse.BooleanOptionalAction}
    if plain == {tuple[str, ...]}:
        return {"action": "append", "metavar": "TEXT"}
    if plain == {tuple[int, ...]}:
        return {"action": "append", "type": int, "metavar": "ID"}
    if plain == {tuple[tuple[int, float], ...]}:
        return {"type": _from_json, "metavar": "JSON"}
    for number in (int, float):
        if plain == {number}:
            return {"type": _or_none(number) if types.NoneType in members else number, "metavar": "N"}
    return {"metavar": "TEXT"}


def _from_json(text: str) -> Any:
    return json.loads(text)


_from_json.__name__ = "JSON"  # argparse names the type in its complaint


def _or_none(number: type[int] | type[float]) -> Callable[[str], int | float | None]:
    def read(text: str) -> int | float | None:
        return None if text.lower() == "none" else number(text)

    read.__name__ = number.__name__  # argparse names the type in its complaint
    return read


def given(options: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The arguments of one group that stood on the command line."""
    start = prefix + "."
    return {name[len(start) :]: value for name, value in vars(options).items() if name.startswith(start)}
