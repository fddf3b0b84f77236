"""Conversations: from messages in OpenAI's shape, through a chat template, to the token ids of prompts.

The template is rendered by transformers, in its sandbox; nothing of it is loaded before the first
conversation. What is generated from the prompts is not this module's matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.errors import InvalidArgument, UnknownArgument, WrongType, reading
from tokenmill.frontend.failures import RAISED, Faults
from tokenmill.imports import import_transformers
from tokenmill.sampling_params import check_flag, check_text, show
from tokenmill.texts import plain_text

if TYPE_CHECKING:
    from tokenmill.frontend.tokenizer import Tokenizer

# What `apply_chat_template` takes beside the variables of the template; most have an argument of `chat`.
_NOT_VARIABLES = frozenset({
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The arguments of `Engine.chat` that say how messages become a prompt."""

    tools: Any = None
    chat_template: Any = None
    add_generation_prompt: Any = True
    continue_final_message: Any = False
    chat_template_kwargs: Any = None


class ChatTemplate:
    """Turns conversations into prompts with the template of one engine. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, template: str | None) -> None:
        """`template` is a Jinja template or the path of one, used instead of the tokenizer's own."""
        self._tokenizer = tokenizer
        self._template = None if template is None else read_template("chat_template", template)

    def token_ids(self, messages: Any, asked: ChatOptions, faults: Faults = RAISED) -> list[Any]:
        """The ids of one conversation, or a list with those of each conversation of a batch.

        Raises `InvalidArgument` or `WrongType`, which name the message, as far as `faults` does not take
        them up; conversations at fault have no ids.
        """
        if self._tokenizer is None:
            raise _no_tokenizer()
        with reading("messages"):
            conversations, places = _read_conversations(messages)
        settings = self._settings(asked)
        with reading("messages"):
            texts = faults.each(
                "messages",
                conversations,
                lambda index, conversation: self._render(conversation, places[index], settings),
                "",
            )
        rows: list[list[int]] = faults.together("messages", texts, self.encode, [])
        rows = faults.each("messages", rows, lambda index, row: _not_empty(row, places[index]), [])
        return rows if _is_batch(messages) else rows[0]

    def text(self, messages: Any, asked: ChatOptions) -> str:
        """The prompt of one conversation, for `encode`. Raises as `token_ids`."""
        if self._tokenizer is None:
            raise _no_tokenizer()
        settings = self._settings(asked)
        with reading("messages"):
            conversations, places = _read_conversations(messages)
            if len(conversations) > 1:
                raise InvalidArgument(
                    f"messages is a list of {len(conversations)} conversations; give one in each item"
                )
            return self._render(conversations[0], places[0], settings)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of prompts that the template made."""
        assert self._tokenizer is not None
        try:
            return self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except InvalidArgument as error:
            raise InvalidArgument(f"messages: in the text that the chat template makes, {error}") from None

    def _settings(self, asked: ChatOptions) -> dict[str, Any]:
        """The keywords of `apply_chat_template`, the same for all conversations of a call."""
        continues = check_flag("continue_final_message", asked.continue_final_message)
        opens = check_flag("add_generation_prompt", asked.add_generation_prompt)
        with reading("chat_template_kwargs"):
            variables = _variables(asked.chat_template_kwargs)
        with reading("tools"):
            tools = _tools(asked.tools)
        with reading("chat_template"):
            template = self._chosen(asked.chat_template)
        return {
            **variables,
            "tools": tools,
            "chat_template": template,
            "continue_final_message": continues,
            "add_generation_prompt": opens and not continues,
        }

    def _chosen(self, given: Any) -> str | None:
        """The template to use; None for the tokenizer's own."""
        assert self._tokenizer is not None
        own = self._tokenizer.get().chat_template
        if given is not None:
            if isinstance(own, Mapping) and given in own:
                return plain_text(given)
            return read_template("chat_template", given)
        if self._template is None and not own:
            raise InvalidArgument(
                "the tokenizer has no chat template; give one as chat_template, to chat() or to Engine(), or "
                "write the prompt yourself and use generate()"
            )
        return self._template

    def _render(self, conversation: Any, place: str, settings: Mapping[str, Any]) -> str:
        _check_conversation(conversation, place)
        messages = [_message(message, f"{place}[{index}]") for index, message in enumerate(conversation)]
        if settings["continue_final_message"] and not messages[-1].get("content"):
            raise InvalidArgument(
                f"{place}[{len(messages) - 1}] has no content to go on with; leave out continue_final_message"
            )
        assert self._tokenizer is not None
        try:
            text: str = self._tokenizer.get().apply_chat_template(messages, tokenize=False, **settings)
        except ImportError:
            raise
        except Exception as error:  # a template is a program, and may fail in any way
            raise InvalidArgument(f"the chat template cannot render {place}: {error}") from error
        return text


def read_template(name: str, value: Any) -> str:
    """A Jinja template: the text itself, or the file that it names."""
    text = check_text(name, value)
    if not _is_template(text):
        try:
            path = Path(text)
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{name} cannot be read from {show(value)}: {error}") from None
    if not _is_template(text):
        raise InvalidArgument(
            f"{name} must be a Jinja template, as text or as the path of its file, got {show(value)}; "
            "templates are not known by name: leave it out for the model's own"
        )
    return text


def check_chat_options(options: Mapping[str, Any]) -> None:
    """Raise for keywords that `generate` has and `chat` has not."""
    for name in ("prompt", "input_ids"):
        if name in options:
            raise UnknownArgument(f"chat() has no argument {name!r}; give messages, or use generate()")


def _no_tokenizer() -> InvalidArgument:
    return InvalidArgument(
        "chat needs a tokenizer, and this engine has none (skip_tokenizer_init); use input_ids"
    )


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


# ── messages ──────────────────────────────────────────────────────────────────────────────────


def _is_batch(messages: Sequence[Any]) -> bool:
    """Whether these are conversations; one that is no list is at fault, unless it looks like a message."""
    if isinstance(messages[0], Mapping):
        return False
    return any(isinstance(each, list | tuple) for each in messages)


def _read_conversations(messages: Any) -> tuple[list[Any], list[str]]:
    """The conversations, not checked yet, and how errors name them."""
    if not isinstance(messages, list | tuple):
        raise WrongType(f"messages must be a list of messages, got {show(messages)}")
    if not messages:
        raise InvalidArgument("messages is empty; give at least one message")
    if not _is_batch(messages):
        return [messages], ["messages"]
    return list(messages), [f"messages[{index}]" for index in range(len(messages))]


def _check_conversation(conversation: Any, place: str) -> None:
    if not isinstance(conversation, list | tuple):
        raise WrongType(f"{place} must be a list of messages like the others, got {show(conversation)}")
    if not conversation:
        raise InvalidArgument(f"{place} is empty; give at least one message")


def _not_empty(tokens: list[int], place: str) -> list[int]:
    if not tokens:
        raise InvalidArgument(f"the chat template makes no text of {place}; check chat_template")
    return tokens


def _message(message: Any, place: str) -> dict[str, Any]:
    """A message as templates expect it: content as one text, arguments of tool calls as objects."""
    if not isinstance(message, Mapping):
        raise WrongType(f"{place} must be a dict with role and content, got {show(message)}")
    if "role" not in message:
        raise InvalidArgument(f"{place} has no role; give 'system', 'user', 'assistant' or 'tool'")
    if not check_text(f"{place}.role", message["role"]):
        raise InvalidArgument(f"{place}.role is empty; give 'system', 'user', 'assistant' or 'tool'")
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None and not calls:
        raise InvalidArgument(f"{place} has neither content nor tool_calls; give content, a text")
    read = {
        **_with_plain_texts(message),
        "content": "" if content is None else _content(content, f"{place}.content"),
    }
    if calls:
        read["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls")
    return read


def _content(content: Any, place: str) -> str:
    """One text; parts of type text are put together as they are."""
    if isinstance(content, str):
        return plain_text(content)
    if not isinstance(content, list | tuple):
        raise WrongType(f"{place} must be a string or a list of parts, got {show(content)}")
    return "".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise WrongType(f"{place} must be a dict like {{'type': 'text', 'text': …}}, got {show(part)}")
    if kind != "text":
        raise InvalidArgument(f"{place} is of type {show(kind)}, which is not supported yet; give text parts")
    return check_text(f"{place}.text", part.get("text"))


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise WrongType(f"{place} must be a list of calls, got {show(calls)}")
    return [_tool_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise WrongType(
            f"{place} must be a dict like {{'type': 'function', 'function': {{'name': …, 'arguments': …}}}}, "
            f"got {show(call)}"
        )
    arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
    return {**call, "function": {**_with_plain_texts(function), "arguments": arguments}}


def _arguments(value: Any, place: str) -> Mapping[str, Any]:
    """The arguments of a call as an object: OpenAI sends JSON text, which templates would quote again."""
    try:
        read = json.loads(value or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{place} is not valid JSON: {error}") from None
    if read is not None and not isinstance(read, Mapping):
        raise WrongType(f"{place} must be a JSON object, as text or as a dict, got {show(value)}")
    return read or {}


# ── tools and variables ───────────────────────────────────────────────────────────────────────


def _tools(value: Any) -> list[Any] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise WrongType(f"tools must be a list of functions, got {show(value)}")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(value)] or None


def _tool(tool: Any, place: str) -> Any:
    if isinstance(tool, Mapping):
        described = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
        if "name" not in described:
            raise InvalidArgument(f"{place} has no 'function' with a name, as tools in OpenAI's shape have")
        return dict(tool)
    if not callable(tool):
        raise WrongType(f"{place} must be a dict in OpenAI's shape or a Python function, got {show(tool)}")
    import_transformers()
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # whatever its signature or docstring lacks
        raise InvalidArgument(f"{place} cannot be described to the model: {error}") from error


def _variables(value: Any) -> dict[str, Any]:
    """`chat_template_kwargs`: variables of the template."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise WrongType(f"chat_template_kwargs must be a dict of variables, got {show(value)}")
    for name in value:
        check_text("a name in chat_template_kwargs", name)
        if name in _NOT_VARIABLES:
            raise InvalidArgument(
                f"chat_template_kwargs has {name!r}, which is no variable of a template; it is for "
                "variables such as enable_thinking"
            )
    return _with_plain_texts(value)


def _with_plain_texts(given: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy whose texts templates print as they are; what lies deeper they mostly write as JSON."""
    return {key: plain_text(value) if isinstance(value, str) else value for key, value in given.items()}
