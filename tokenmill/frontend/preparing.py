"""From the arguments of `generate` and `chat` to a call that can be run: read, checked, joined to a session.

Owns nothing but the order in which the parts that know about it are asked.
"""

from __future__ import annotations

from typing import Any

from tokenmill.frontend.calls import Call
from tokenmill.frontend.chat import ChatOptions, ChatTemplate, check_chat_options
from tokenmill.frontend.client import Client
from tokenmill.frontend.failures import Faults
from tokenmill.frontend.inputs import InputReader
from tokenmill.frontend.prompt_lint import PromptLint
from tokenmill.frontend.sessions import Sessions
from tokenmill.sampling_params import check_flag


class Preparation:
    """Prepares the calls of one engine; nothing runs yet. May be used from any thread."""

    def __init__(
        self,
        client: Client,
        reader: InputReader,
        sessions: Sessions,
        template: ChatTemplate,
        lint: PromptLint,
    ) -> None:
        self._client = client
        self._reader = reader
        self._sessions = sessions
        self._template = template
        self._lint = lint

    def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        input_ids: Any,
        rid: Any,
        stream: Any,
        options: dict[str, Any],
    ) -> Call:
        """See `Engine.generate`; `options` are its other keywords."""
        streams = check_flag("stream", stream)
        session = self._sessions.continuation(options.get("session_params"), options.get("session_id"))
        job = self._reader.read(
            prompt,
            sampling_params,
            input_ids,
            rid=rid,
            stream=streams,
            options=options,
            session=session,
            faults=Faults.of(options),
        )
        if input_ids is None and not job.errors:
            self._lint.look(prompt)
        return self._client.prepare(job, stream=streams)

    def chat(
        self,
        messages: Any,
        asked: ChatOptions,
        sampling_params: Any,
        rid: Any,
        stream: Any,
        options: dict[str, Any],
    ) -> Call:
        """See `Engine.chat`; `options` are its other keywords."""
        check_chat_options(options)
        streams = check_flag("stream", stream)
        faults = Faults.of(options)
        session = self._sessions.continuation(options.get("session_params"), options.get("session_id"))
        job = self._reader.read(
            input_ids=self._template.token_ids(messages, asked, faults),
            sampling_params=sampling_params,
            rid=rid,
            stream=streams,
            options=options,
            session=session,
            source="messages",
            faults=faults,
        )
        return self._client.prepare(job, stream=streams)
