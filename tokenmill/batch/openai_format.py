"""OpenAI's batch files: a request on each line in, an answer on each line out, and a file of errors.

Owns what stands around the bodies: ids, urls, status codes. The bodies are `frontend/openai.py`'s matter.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from tokenmill.batch.input_record import Record, Source, bad_parameters
from tokenmill.batch.json_text import json_line
from tokenmill.batch.openai_parts import PartResults, whole_of
from tokenmill.batch.rows import PROMPT_COLUMNS
from tokenmill.errors import InvalidArgument, RowError, did_you_mean
from tokenmill.frontend.openai import (
    CHAT_URL,
    COMPLETIONS_URL,
    chat_completion,
    error_body,
    read_chat,
    read_completions,
    text_completion,
)
from tokenmill.sampling_params import brief, show

logger = logging.getLogger("tokenmill")

_URLS = (CHAT_URL, COMPLETIONS_URL)
_LATER_URL = "/v1/embeddings"
_KEYS = ("custom_id", "method", "url", "body")
_ROWS_TO_DETECT = 100


def is_batch_file(source: Source, *, has_columns: bool = False) -> bool:
    """Whether the first row that is either a request of OpenAI's batch API or has a prompt is the former.

    Where somebody says how prompts are made (`has_columns`), requests without `custom_id` are plain rows.
    """
    if source.format != "jsonl":
        return False
    readable = (record.fields for record in source if record.fields is not None)
    for fields in islice(readable, _ROWS_TO_DETECT):
        names = fields.keys()
        has_prompt = has_columns or not names.isdisjoint(PROMPT_COLUMNS)
        if {"method", "url", "body"} <= names and ("custom_id" in names or not has_prompt):
            return True
        if has_prompt:
            return False
    return False


class OpenAIRows:
    """Makes items of the rows of a batch file. Its lines come in order when they come for the first time."""

    def __init__(
        self, *, model: str, sampling_params: Mapping[str, Any] | None = None, has_tokenizer: bool = True
    ) -> None:
        """`model` is what answers, whatever the lines name; `sampling_params` hold where they are silent.

        Raises `InvalidArgument` for an engine without a tokenizer.
        """
        if not has_tokenizer:
            raise InvalidArgument(
                "a batch file of OpenAI's is answered by texts, but this engine has no tokenizer "
                "(skip_tokenizer_init=True); leave that out, or give rows of input_ids"
            )
        self._model = model
        self._defaults = dict(sampling_params or {})
        self._url: str | None = None  # that of all lines: the first one's
        self._has_warned = False
        self._num_seen = 0
        self._ids: set[int] = set()  # digests of the ids of lines seen so far
        self._duplicates: set[int] = set()  # indexes of lines

    def item(self, record: Record) -> dict[str, Any] | RowError:
        """The item of a line, or why there is none; see `RowMaker`."""
        is_duplicate = self._is_duplicate(record)
        if record.fields is None:
            assert record.error is not None
            return record.error
        fault = _fault(record.fields) or self._fault_among_others(record.fields, is_duplicate=is_duplicate)
        if fault is not None:
            return bad_parameters(f"{record.place}: {fault}")
        try:
            return self._item(record.fields["url"], record.fields["body"])
        except InvalidArgument as error:
            return bad_parameters(str(error))

    def _item(self, url: str, body: Any) -> dict[str, Any]:
        self._warn_of_model(body)
        if url == CHAT_URL:
            return read_chat(body, defaults=self._defaults)
        items = read_completions(body, defaults=self._defaults)
        assert len(items) == 1, "lines with several prompts come in parts"
        return items[0]

    def _fault_among_others(self, fields: dict[str, Any], *, is_duplicate: bool) -> str | None:
        if is_duplicate:
            return f"custom_id {show(fields['custom_id'])} is that of an earlier line; each needs its own"
        self._url = self._url or fields["url"]
        if fields["url"] != self._url:
            return f"url is {fields['url']}, but earlier lines have {self._url}; a batch has one url"
        return None

    def _is_duplicate(self, record: Record) -> bool:
        """Whether an earlier line has this id; looked up when a line comes for the first time, then known."""
        record = whole_of(record)
        if record.index >= self._num_seen:
            self._num_seen = record.index + 1
            custom_id = None if record.fields is None else record.fields.get("custom_id")
            if isinstance(custom_id, str):
                digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8).digest()
                number = int.from_bytes(digest, "little")
                if number in self._ids:
                    self._duplicates.add(record.index)
                self._ids.add(number)
        return record.index in self._duplicates

    def _warn_of_model(self, body: Any) -> None:
        asked = body.get("model") if isinstance(body, Mapping) else None
        if asked is not None and asked != self._model and not self._has_warned:
            self._has_warned = True
            logger.warning("the batch file asks for model %s; %r answers instead", show(asked), self._model)


class OpenAIOutput:
    """Lines of the output file and of the error file, as OpenAI writes them; the same for the same request.

    So nothing in them tells of the run: ids are made of the line's place and content, dates are 0, and the
    number of cached tokens is left out.
    """

    def __init__(self, *, model: str) -> None:
        self._model = model
        self._parts = PartResults()

    def line(self, record: Record, results: Sequence[Mapping[str, Any]]) -> tuple[bytes | None, bytes | None]:
        """A line for the output file, or one for the error file if any of the results has failed.

        A line in parts is written with the last of them.
        """
        taken = self._parts.take(record, results)
        return (None, None) if taken is None else self._line(*taken)

    def _line(
        self, record: Record, results: Sequence[Mapping[str, Any]], num_prompts: int
    ) -> tuple[bytes | None, bytes | None]:
        fields: dict[str, Any] = record.fields or {}
        word = _word(record)
        line = {"id": f"batch_req_{word}", "custom_id": fields.get("custom_id")}
        error = next((result["error"] for result in results if result.get("error") is not None), None)
        if error is None:
            if fields["url"] == CHAT_URL:
                body = chat_completion(results, id=word, model=self._model)
            else:
                body = text_completion(results, id=word, model=self._model, num_prompts=num_prompts)
            return json_line({**line, "response": _answer(word, 200, body), "error": None}), None
        # What is no request at all was never answered.
        is_request = _fault(fields) is None
        answer = _answer(word, error["status_code"], error_body(error)) if is_request else None
        told = {"code": error["type"], "message": error["message"]}
        return None, json_line({**line, "response": answer, "error": told})


def _fault(fields: dict[str, Any]) -> str | None:
    """What makes a line no request, whatever the others are."""
    missing = [key for key in _KEYS if key not in fields]
    unknown = [key for key in fields if key not in _KEYS]
    if missing:
        has = f" (it has {brief(unknown[0])})" if unknown else ""
        return f"the line has no {' and no '.join(missing)}{has}; a request has {', '.join(_KEYS)}"
    if unknown:
        return f"a request has no {brief(unknown[0])}, only {', '.join(_KEYS)}"
    custom_id, method, url, _ = (fields[key] for key in _KEYS)
    if not isinstance(custom_id, str) or not custom_id:
        return f"custom_id must be a text that is not empty, got {show(custom_id)}"
    if method != "POST":
        return f"method must be 'POST', got {show(method)}"
    if url == _LATER_URL:
        return f"url is {_LATER_URL}, which is not served yet, only {' and '.join(_URLS)}"
    if url not in _URLS:
        hint = did_you_mean(url, _URLS) if isinstance(url, str) else ""
        return f"url must be {' or '.join(_URLS)}, got {show(url)}.{hint}"
    return None


def _answer(word: str, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status_code, "request_id": f"req_{word}", "body": body}


def _word(record: Record) -> str:
    """What ids are made of: it differs between lines and never between runs."""
    content = json.dumps([record.index, record.fields, record.error])
    return hashlib.sha256(content.encode()).hexdigest()[:32]
