"""Rows that are read one by one: from any accepted shape of an item to its requests, or to why it has none.

A fault belongs to its item alone. What is the same for all items is read once, and all texts are tokenized in
one call; what the parts of an item mean is the matter of `inputs.py`, `options.py` and `chat.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from tokenmill.errors import InvalidArgument, RowError, UnknownArgument, WrongType, did_you_mean, reading
from tokenmill.frontend.chat import ChatOptions, ChatTemplate
from tokenmill.frontend.failures import row_error
from tokenmill.frontend.inputs import InputReader, Job
from tokenmill.frontend.insight import HiddenStatesFormat
from tokenmill.frontend.options import MEDIA, GenerateOptions, RequestOptions, read_options, state_format
from tokenmill.frontend.prompt_lint import PromptLint
from tokenmill.frontend.prompts import plain_rows, token_ids
from tokenmill.frontend.settings import Settings, content_of
from tokenmill.frontend.turns import Turns
from tokenmill.messages import EngineFacts, IntArray
from tokenmill.sampling_params import SamplingParams, show
from tokenmill.texts import check_encodable, plain_text

_PROMPT_KEYS = ("prompt", "input_ids", "messages")
_CHAT_KEYS = tuple(field.name for field in dataclasses.fields(ChatOptions))
_OPTION_KEYS = frozenset((*GenerateOptions.__annotations__, *MEDIA)) - {"on_error"}
_ITEM_KEYS = frozenset((*_PROMPT_KEYS, "sampling_params", "rid", *_CHAT_KEYS, *_OPTION_KEYS))

_NO_TOKENS: IntArray = np.empty(0, np.int32)
_READING = reading("an item")

# Keywords of `generate` that cannot hold for all items, and what to do instead.
_NOT_FOR_ALL = {
    "prompt": "give each prompt as an item",
    "input_ids": "give each prompt as an item: its token ids, or {'input_ids': [...]}",
    "rid": "give each item its own: {'prompt': '...', 'rid': '...'}",
    "stream": "results of items come whole; for streams use generate() or chat()",
}

Read = TypeVar("Read")
# What messages call a prompt, its text (None: it is tokens), and its tokens.
_Prompt = tuple[str, str | None, IntArray]


@dataclass(frozen=True, slots=True)
class _Common:
    """What holds for every item that says nothing else."""

    params: Mapping[str, Any]  # sampling parameters, as they were written
    settings: Settings
    options: Mapping[str, Any]
    asked: RequestOptions
    states: HiddenStatesFormat
    chat: Mapping[str, Any]
    # Settings of items by what their parameters say; and these, for the key may hold the identity of a part.
    known: dict[Hashable, tuple[Settings, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class _Draft:
    """An item that is read but for the tokens of its text."""

    place: str  # what messages call the prompt
    text: str | None
    tokens: IntArray | RowError  # of a text, once it is tokenized, or why it cannot be
    settings: Settings
    asked: RequestOptions
    states: HiddenStatesFormat
    rid: Any = None


class ItemReader:
    """Reads items for one engine. Thread-safe."""

    def __init__(
        self, reader: InputReader, template: ChatTemplate, facts: EngineFacts, lint: PromptLint
    ) -> None:
        self._reader = reader
        self._template = template
        self._facts = facts
        self._lint = lint

    def read(
        self, items: Sequence[Any], *, sampling_params: Any, options: Mapping[str, Any] | None, turns: Turns
    ) -> list[Job | RowError]:
        """The requests of each item, or why it has none.

        `sampling_params` and `options` (keywords of `generate`, and of `chat` for messages) are for all;
        what an item says itself goes before them, name by name. Raises `InvalidArgument` for these two only.
        """
        common = self._common(sampling_params, options or {})
        read = [_guarded(turns, self._draft, item, common) for item in items]
        texts = [each for each in read if isinstance(each, _Draft) and each.text is not None]
        plain = [draft for draft in texts if draft.place == "prompt"]
        if plain:
            self._lint.look([plain[0].text])
        self._tokenize(plain, self._reader.encode)
        self._tokenize([draft for draft in texts if draft.place == "messages"], self._template.encode)
        return [
            _guarded(turns, self._job, each, number)
            if isinstance(each, _Draft)
            else self._left_out(each, items[number], common)
            for number, each in enumerate(read)
        ]

    # ── what holds for all ──

    def _common(self, sampling_params: Any, options: Mapping[str, Any]) -> _Common:
        with reading("sampling_params"):
            settings = self._reader.settings(sampling_params)
        chat = {name: value for name, value in options.items() if name in _CHAT_KEYS}
        rest = {name: value for name, value in options.items() if name not in _CHAT_KEYS}
        _check_for_all(rest)
        [asked] = read_options(rest, ["an item"], single=True, facts=self._facts)
        return _Common(
            _written(sampling_params, settings.params), settings, rest, asked, state_format(rest), chat
        )

    # ── one item ──

    def _draft(self, item: Any, common: _Common) -> _Draft:
        with _READING:
            if isinstance(item, Mapping):
                return self._draft_of_dict(dict(item), common)
            place, text, tokens = self._plain_prompt(item)
        return _Draft(place, text, tokens, common.settings, common.asked, common.states)

    def _plain_prompt(self, item: Any) -> _Prompt:
        if isinstance(item, str):
            check_encodable(item, "prompt")
            return "prompt", plain_text(item), _NO_TOKENS
        if isinstance(item, bytes | bytearray):
            raise WrongType(f"an item is bytes, got {show(item)}; decode it, or open the file as text")
        if isinstance(item, list | tuple) and item and isinstance(item[0], Mapping):
            raise WrongType("an item is a list of dicts; give a conversation as {'messages': [...]}")
        return "an item", None, token_ids(item, "an item", self._facts.vocab_size)

    def _draft_of_dict(self, given: dict[Any, Any], common: _Common) -> _Draft:
        for name in given:
            if name not in _ITEM_KEYS:
                raise UnknownArgument(
                    f"an item has no key {show(name)}.{did_you_mean(str(name), _ITEM_KEYS)} It has prompt, "
                    "input_ids or messages, and what generate() takes by keyword"
                )
        settings, asked, states = common.settings, common.asked, common.states
        if (params := given.get("sampling_params")) is not None:
            settings = self._settings(params, common)
        own = {name: value for name, value in given.items() if name in _OPTION_KEYS and value is not None}
        if own:
            _check_no_session(own)
            [asked] = read_options({**common.options, **own}, ["an item"], single=True, facts=self._facts)
            states = state_format({**common.options, **own})
        place, text, tokens = self._prompt(given, common.chat)
        return _Draft(place, text, tokens, settings, asked, states, given.get("rid"))

    def _settings(self, params: Any, common: _Common) -> Settings:
        """The settings of an item's own parameters; equal ones are read once."""
        if isinstance(params, Mapping) and not params:
            return common.settings
        key = content_of(params)
        if key not in common.known:
            is_partial = isinstance(params, Mapping)
            read = self._reader.settings({**common.params, **params} if is_partial else params)
            if is_partial and "max_new_tokens" not in params:
                read = dataclasses.replace(read, is_length_explicit=common.settings.is_length_explicit)
            common.known[key] = read, (params, list(params.values()) if is_partial else None)
        return common.known[key][0]

    def _prompt(self, given: Mapping[Any, Any], chat: Mapping[str, Any]) -> _Prompt:
        names = [name for name in _PROMPT_KEYS if given.get(name) is not None]
        if len(names) != 1:
            has = " and ".join(names) if names else "none of them"
            raise InvalidArgument(f"an item must have one of prompt, input_ids and messages; it has {has}")
        own = {name: given[name] for name in _CHAT_KEYS if given.get(name) is not None}
        name, value = names[0], given[names[0]]
        if name == "messages":
            text = self._template.text(value, ChatOptions(**{**chat, **own}))
            check_encodable(text, name)
            return name, text, _NO_TOKENS
        if own:
            raise InvalidArgument(f"{next(iter(own))} is for messages, but the item has {name}; leave it out")
        if name == "input_ids":
            return name, None, token_ids(value, name, self._facts.vocab_size)
        if not isinstance(value, str):
            raise WrongType(f"the prompt of an item must be a string, got {show(value)}")
        return self._plain_prompt(value)

    def _tokenize(self, drafts: Sequence[_Draft], encode: Callable[[list[str]], list[list[int]]]) -> None:
        """Give drafts the tokens of their texts, in one call; where that fails, without those that fail."""
        if not drafts:
            return
        try:
            rows = encode([draft.text or "" for draft in drafts])
        except Exception as error:  # a tokenizer of a model's own code may raise anything
            if len(drafts) == 1:
                drafts[0].tokens = row_error(error)
                return
            middle = len(drafts) // 2
            self._tokenize(drafts[:middle], encode)
            self._tokenize(drafts[middle:], encode)
            return
        for draft, row in zip(drafts, plain_rows(rows, self._facts.vocab_size) or rows, strict=True):
            draft.tokens = np.asarray(row, dtype=np.int32)

    def _left_out(self, error: RowError, item: Any, common: _Common) -> RowError:
        """The error of an item, which takes its seeds: those of rows behind it do not depend on it."""
        try:
            params = item.get("sampling_params") if isinstance(item, Mapping) else None
        except Exception:  # an item may be anything at all
            params = None
        self._reader.seeds(None, self._reader.n_as_given(params, otherwise=common.settings.params.n))
        return error

    def _job(self, draft: _Draft, number: int) -> Job | RowError:
        tokens, params = draft.tokens, draft.settings.params
        seeds = self._reader.seeds(params.sampling_seed, params.n)  # whatever is wrong with the row
        if isinstance(tokens, dict):
            return tokens
        row = tokens if draft.text is None else self._reader.check_tokens(tokens, draft.text, draft.place)
        requests = self._reader.read_row(
            row,
            draft.settings,
            draft.asked,
            place=draft.place,
            rid=draft.rid,
            number=number,
            seeds=seeds,
        )
        return Job(
            requests, single=len(requests) == 1, hidden_states_format=draft.states, returns_errors=True
        )


def _guarded(turns: Turns, read: Callable[..., Read], *arguments: Any) -> Read | RowError:
    """What `read` gives, or what it raises, as data."""
    turns.give_way()
    try:
        return read(*arguments)
    except Exception as error:  # an item may be anything at all; it fails alone
        return row_error(error)


def _written(value: Any, params: SamplingParams) -> Mapping[str, Any]:
    """Sampling parameters by name, as they were written; of an object all, for it is complete."""
    if value is None or isinstance(value, Mapping):
        return value or {}
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def _check_for_all(options: Mapping[str, Any]) -> None:
    """Raise for what cannot hold for all items, and would have no effect."""
    for name, remedy in _NOT_FOR_ALL.items():
        value = options.get(name)
        is_off = value is None or (name == "stream" and value is False)
        if not is_off:
            raise InvalidArgument(f"{name} is no keyword of all items, got {show(value)}; {remedy}")
    _check_no_session(options)


def _check_no_session(options: Mapping[str, Any]) -> None:
    if options.get("session_params") is not None:
        raise InvalidArgument(
            "session_params: the turns of a session wait for each other, rows that run together do not; use "
            "generate() or chat(), turn by turn"
        )
