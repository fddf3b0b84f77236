"""Scores of items: how likely each of some tokens is right after a text.

Owns what `score` takes and gives. The numbers come from requests that generate nothing and are told the
log-probabilities of the label tokens; all items go as one batch, so that what they share is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument, UnknownArgument, WrongType, did_you_mean, reading, request_error
from tokenmill.frontend.inputs import InputReader
from tokenmill.frontend.options import check_told_ids
from tokenmill.frontend.outputs import ABORTED
from tokenmill.frontend.prompts import token_ids
from tokenmill.messages import EngineFacts, IntArray
from tokenmill.sampling_params import SamplingParams, check_flag, check_real, show, unpacked
from tokenmill.texts import check_encodable

if TYPE_CHECKING:
    from tokenmill.frontend.calls import Call
    from tokenmill.frontend.client import Client
    from tokenmill.frontend.tokenizer import Tokenizer


class ScoreOptions(TypedDict, total=False):
    """Arguments of `score` that are given by keyword only; all but `temperature` must stay off."""

    temperature: float
    embed_override_token_id: Any
    query_embed_overrides: Any
    item_embed_overrides: Any
    stacked_query_item_embed_overrides: Any
    return_pooled_hidden_states: Any
    score_extraction_token_id: Any
    return_token_logprobs: Any


_NAMES = ("query", "items", "label_token_ids", "apply_softmax", "item_first", *ScoreOptions.__annotations__)


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Answer of `score`; also read as the list of its scores, which it is in older releases of SGLang."""

    scores: list[list[float]]  # of each item, in the order given, for each label, in the order given
    prompt_tokens: int  # of all items together, each with the query
    # Of SGLang's, where arguments ask for them that are not supported here.
    pooled_hidden_states: None = None
    token_logprobs: None = None

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[list[float]]:
        return iter(self.scores)

    def __getitem__(self, item: int) -> list[float]:
        return self.scores[item]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A checked call. Without items, nothing needs to run."""

    call: Call | None
    apply_softmax: bool


class Scoring:
    """Scores items with one engine. Thread-safe."""

    def __init__(
        self, config: EngineConfig, client: Client, reader: InputReader, tokenizer: Tokenizer | None
    ) -> None:
        self._config = config
        self._client = client
        self._reader = reader
        self._tokenizer = tokenizer

    def run(self, *arguments: Any, **options: Any) -> ScoreResult:
        """See `Engine.score`."""
        asked = self._prepare(*arguments, **options)
        return _result([] if asked.call is None else self._client.run(asked.call), asked)

    async def run_async(self, *arguments: Any, **options: Any) -> ScoreResult:
        """As `run`; only the calling task waits."""
        asked = await self._client.threads.run(self._prepare, *arguments, **options)
        return _result([] if asked.call is None else await self._client.run_async(asked.call), asked)

    def _prepare(
        self,
        query: Any = None,
        items: Any = None,
        label_token_ids: Any = None,
        apply_softmax: Any = False,
        item_first: Any = False,
        **options: Any,
    ) -> _Asked:
        temperature = _temperature(options)
        if self._config.logprobs_ignore_temperature and temperature != 1:
            raise InvalidArgument(
                f"temperature is {temperature}, but this engine was made with "
                "logprobs_ignore_temperature=True; leave temperature at 1.0"
            )
        with reading("label_token_ids"):
            labels = _labels(label_token_ids, self._client.facts)
        softmax = check_flag("apply_softmax", apply_softmax)
        first = check_flag("item_first", item_first)
        with reading("query or items"):
            rows = self._rows(query, items, item_first=first)
        if not rows:
            return _Asked(None, softmax)
        job = self._reader.read(
            input_ids=rows,
            sampling_params=SamplingParams(max_new_tokens=0, temperature=temperature),
            options={"return_logprob": True, "token_ids_logprob": labels},
            source="items",
        )
        return _Asked(self._client.prepare(job, stream=False), softmax)

    def _rows(self, query: Any, items: Any, *, item_first: bool) -> list[Any]:
        """The token ids of each item with the query."""
        if query is None:
            raise InvalidArgument("query is None; give the text or the token ids that all items share")
        if items is None:
            raise InvalidArgument("items is None; give a list of texts, or of rows of token ids")
        items = [items] if isinstance(items, str) else unpacked("items", items)
        if not isinstance(items, list | tuple):
            raise WrongType(f"items must be a list of texts, or of rows of token ids, got {show(items)}")
        if isinstance(query, str):
            return self._tokenize(query, items, item_first=item_first)
        return _joined(query, items, self._client.facts, item_first=item_first)

    def _tokenize(self, query: str, items: Sequence[Any], *, item_first: bool) -> list[list[int]]:
        check_encodable(query, "query")
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise WrongType(
                    f"items[{index}] must be a text, as query is, got {show(item)}; tokenize both or neither"
                )
            check_encodable(item, f"items[{index}]")
        if self._tokenizer is None:
            raise InvalidArgument(
                "query is a text, but this engine has no tokenizer (skip_tokenizer_init); give token ids"
            )
        if not items:
            return []
        return self._tokenizer.encode_batch([item + query if item_first else query + item for item in items])


def _joined(query: Any, items: Sequence[Any], facts: EngineFacts, *, item_first: bool) -> list[IntArray]:
    is_empty = isinstance(query, list | tuple) and not query
    shared = np.empty(0, np.int32) if is_empty else token_ids(query, "query", facts.vocab_size)
    rows = []
    for index, item in enumerate(items):
        if isinstance(item, str):
            raise WrongType(
                f"items[{index}] must be a list of token ids, as query is, got {show(item)}; "
                "tokenize both or neither"
            )
        own = token_ids(item, f"items[{index}]", facts.vocab_size)
        rows.append(np.concatenate([own, shared] if item_first else [shared, own]))
    return rows


def _temperature(options: Mapping[str, Any]) -> float:
    for name, value in options.items():
        if name not in _NAMES:
            raise UnknownArgument(f"score() has no argument {name!r}.{did_you_mean(name, _NAMES)}")
        if name != "temperature" and value is not None and value is not False:
            raise InvalidArgument(f"{name} is not supported, got {show(value)}; leave it out")
    return check_real("temperature", options.get("temperature", 1.0), minimum=0, above=True)


def _labels(value: Any, facts: EngineFacts) -> list[int]:
    if value is None:
        raise InvalidArgument(
            "label_token_ids is None; give the ids of the tokens whose probabilities are the scores"
        )
    labels: list[int] = token_ids(value, "label_token_ids", facts.vocab_size).tolist()
    check_told_ids("label_token_ids", len(labels), facts.vocab_size)
    return labels


def _result(results: Any, asked: _Asked) -> ScoreResult:
    scores = []
    for index, result in enumerate(results):
        reason = result["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            raise request_error(
                f"items[{index}] was aborted: {reason['message']}",
                error_type="aborted",
                status_code=ABORTED,
            )
        [labels] = result["meta_info"]["output_token_ids_logprobs"]
        scores.append(_probabilities([value for value, _, _ in labels], softmax=asked.apply_softmax))
    return ScoreResult(scores, sum(result["meta_info"]["prompt_tokens"] for result in results))


def _probabilities(logprobs: Sequence[float], *, softmax: bool) -> list[float]:
    values = np.array(logprobs, dtype=np.float64)
    weights = np.exp(values - values.max() if softmax else values)
    probabilities: list[float] = (weights / weights.sum() if softmax else weights).tolist()
    return probabilities
