"""How long prompts and outputs may be, by the limits of a model and of its memory."""

from __future__ import annotations

import logging
from typing import Protocol

from tokenmill import logs
from tokenmill.errors import TooLong
from tokenmill.messages import EngineFacts, IntArray
from tokenmill.sampling_params import show

_log = logging.getLogger("tokenmill")


class Tokenizer(Protocol):
    """What counting needs of a tokenizer."""

    most_tokens: int | None


class Lengths:
    """The lengths of requests to one engine; `place` names a prompt in messages."""

    def __init__(self, facts: EngineFacts, tokenizer: Tokenizer | None, *, may_truncate: bool) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._may_truncate = may_truncate

    def fitted(self, row: IntArray, asked: int | None, place: str) -> IntArray:
        """The prompt; its first tokens, where it is too long and the engine may cut it.

        `asked` is `max_new_tokens`, None where nothing was asked for.
        """
        most = self._longest_prompt(asked)
        if len(row) <= most or not self._may_truncate:
            return row
        count = self._shown_count(row, place)
        logs.warn_once(
            "allow_auto_truncate",
            "prompts that are too long are cut to their first tokens (allow_auto_truncate); "
            'log_level="warning" tells of each',
        )
        _log.warning("%s has %s tokens and is cut to its first %d (allow_auto_truncate)", place, count, most)
        return row[:most]

    def limit(self, row: IntArray, asked: int | None, place: str, *, is_explicit: bool) -> int:
        """Most tokens the request may generate: what was asked for, or what fits if nothing was.

        Raises `TooLong` for what does not fit, unless it was not asked for explicitly.
        """
        most = self._facts.max_sequence_tokens
        if len(row) > self._longest_prompt(asked):
            raise TooLong(
                f"{place} has {self._shown_count(row, place)} tokens, but a sequence has at most {most}, and "
                "one must remain for the output, unless max_new_tokens is 0 or 1 and the prompt just fits; "
                f"shorten it or raise {self._limiting_argument()}"
            )
        room = max(1, most - len(row))
        if asked is None:
            return room
        if asked > room and is_explicit and not self._may_truncate:
            raise TooLong(
                f"{place} has {len(row)} tokens and max_new_tokens is {show(asked)}, but a sequence has at "
                f"most {most}; lower max_new_tokens to {room}, leave it out, or raise "
                f"{self._limiting_argument()}"
            )
        return min(asked, room)

    def _longest_prompt(self, asked: int | None) -> int:
        """The last token of a sequence is drawn, but not computed: an output of one takes no room."""
        return self._facts.max_sequence_tokens - (asked is None or asked > 1)

    def _shown_count(self, row: IntArray, place: str) -> str:
        """How many tokens a prompt has; of a text that is far too long the tokenizer may count a part."""
        counted = None if self._tokenizer is None else self._tokenizer.most_tokens
        if counted is None or len(row) < 2 * counted or place.startswith("input_ids"):
            return f"{len(row)}"
        return f"at least {2 * counted}"

    def _limiting_argument(self) -> str:
        is_pool = self._facts.max_sequence_tokens < self._facts.context_length
        return "max_total_tokens" if is_pool else "context_length"
