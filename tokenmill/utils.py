"""The names that users of `sglang.utils` import: thin shells around an engine's streams, and `print`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument


def stream_and_merge(llm: Any, prompt: Any, sampling_params: Any = None) -> str:
    """Stream one prompt and return its whole text, in either mode of streaming."""
    merger = _Merger(llm)
    chunks = llm.generate(prompt, sampling_params, stream=True)
    return "".join(merger.new_text(chunk) for chunk in chunks)


async def async_stream_and_merge(llm: Any, prompt: Any, sampling_params: Any = None) -> AsyncIterator[str]:
    """Stream one prompt and give each new piece of text, in either mode of streaming."""
    merger = _Merger(llm)
    chunks = await llm.async_generate(prompt, sampling_params, stream=True)
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield merger.new_text(chunk)


def trim_overlap(existing_text: str, new_chunk: str) -> str:
    """`new_chunk` without its longest start that `existing_text` ends with.

    Kept for programs that import it. It cannot tell an overlap from a word that is said twice, so nothing
    here uses it.
    """
    for length in range(min(len(existing_text), len(new_chunk)), 0, -1):
        if existing_text.endswith(new_chunk[:length]):
            return new_chunk[length:]
    return new_chunk


def print_highlight(html_content: Any) -> None:
    """Print a text, as notebooks of SGLang do with their results."""
    print(html_content)


class _Merger:
    """Takes the new text out of chunks, by the engine's mode of streaming and never by comparing text."""

    def __init__(self, llm: Any) -> None:
        self._cumulative = _streams_cumulatively(llm)
        self._length = 0

    def new_text(self, chunk: dict[str, Any]) -> str:
        if "index" in chunk:
            raise InvalidArgument("merging takes one prompt with n=1; stream a batch and use chunk['index']")
        text: str = chunk["text"]
        if not self._cumulative:
            return text
        new = text[self._length :]
        self._length = len(text)
        return new


def _streams_cumulatively(llm: Any) -> bool:
    """Whether chunks repeat the text so far: what our config says, or SGLang's arguments do."""
    config = getattr(llm, "config", None)
    if isinstance(config, EngineConfig):
        return config.cumulative_stream
    arguments = getattr(llm, "server_args", None)
    return not getattr(arguments, "incremental_streaming_output", False)
