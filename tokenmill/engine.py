"""`Engine`: SGLang's offline API, sync and async, wired together from its parts. No logic of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from tokenmill import logs
from tokenmill.arguments import ServerArgs, anchored
from tokenmill.errors import InvalidArgument
from tokenmill.frontend.chat import ChatOptions, ChatTemplate
from tokenmill.frontend.client import Client
from tokenmill.frontend.control import Control, TokenizerManager, missing
from tokenmill.frontend.event_loops import OwnLoop
from tokenmill.frontend.facts import model_info
from tokenmill.frontend.inputs import InputReader
from tokenmill.frontend.items import ItemReader
from tokenmill.frontend.iteration import Order, RowRunner
from tokenmill.frontend.iterator import ResultIterator
from tokenmill.frontend.options import GenerateOptions
from tokenmill.frontend.outputs import FlushResult
from tokenmill.frontend.planning import Plan, Planner
from tokenmill.frontend.preparing import Preparation
from tokenmill.frontend.prompt_lint import PromptLint
from tokenmill.frontend.scoring import ScoreOptions, ScoreResult, Scoring
from tokenmill.frontend.sessions import Sessions
from tokenmill.frontend.tokenizer import Tokenizer
from tokenmill.garbage import uncollected
from tokenmill.sampling_params import check_flag, check_text

OnError = Literal["return", "raise"]


class Engine:
    """A loaded model that answers prompts, with the API of SGLang's offline engine.

    May be used from any number of threads and event loops at once, and next to other engines. It is shut
    down by `shutdown()`, at the end of a `with` block, when nobody holds it any more, or at exit.
    """

    def __init__(self, model_path: str | None = None, **arguments: Any) -> None:
        """Load the model; returns when it can generate.

        `arguments` are the fields of `EngineConfig`, or what SGLang calls them. Raises `InvalidArgument`
        (a ValueError) for names and values that cannot be served, `ModelNotFound`, and `UnsupportedModel`.
        """
        if model_path is not None:
            arguments["model_path"] = model_path
        began = time.perf_counter()
        given = ServerArgs(**arguments)
        self.config = given.fixed()
        self._is_named = given.served_model_name is not None
        logs.set_level(self.config.log_level)
        self._tokenizer = None if self.config.skip_tokenizer_init else Tokenizer.load(self.config)
        template = ChatTemplate(self._tokenizer, self.config.chat_template)
        self._client = Client(self.config, self._tokenizer)
        # The client does not hold the engine, so this also runs when the engine is garbage; and at exit.
        self._own_loop = OwnLoop()
        self._close = weakref.finalize(self, _close, self._client, self._own_loop)
        if self._tokenizer is not None:
            self._tokenizer.most_tokens = self._client.facts.max_sequence_tokens
        self._reader = InputReader.of(self.config, self._client.facts, self._tokenizer)
        # Apart, so that scores take no seeds from later requests.
        self._scoring = Scoring(self.config, self._client, self._reader.apart(), self._tokenizer)
        self._control = Control(self._client)
        self._startup_seconds = time.perf_counter() - began
        self._sessions = Sessions(self._tokenizer)
        lint = PromptLint(self._tokenizer)
        self._items = ItemReader(self._reader, template, self._client.facts, lint)
        self._preparation = Preparation(self._client, self._reader, self._sessions, template, lint)
        self.planner = Planner(self.config, self._client, self._reader.apart())

    # ── generating ────────────────────────────────────────────────────────────────────────────

    @uncollected()
    def generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        image_data: Any = None,
        audio_data: Any = None,
        video_data: Any = None,
        *,
        stream: bool = False,
        rid: Any = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Continue one prompt or a batch of prompts.

        `prompt` is a string or a list of them, taken as it is (no chat template); or `input_ids`, a list of
        token ids or a list of such lists (tuples, arrays and tensors, too). `sampling_params` is a dict or
        `SamplingParams`, or a list with one for each prompt. `rid` names the requests.

        Returns a dict with `text`, `output_ids` and `meta_info`; for a batch, or with `n` above 1, a list of
        them in input order, sample `j` of prompt `i` at `i * n + j`. With `stream=True` returns an iterator
        of such dicts, each with what is new since the last one (with `cumulative_stream`, with everything so
        far) and, for a batch, the `index` of the result it belongs to; closing it cancels what is not done.

        With `on_error="return"` a row that fails has the key `error`, which is None in all others, and the
        rest goes on; by default the first failure is raised (docs/errors.md). Ctrl-C while it waits is an
        `Interrupted` (a KeyboardInterrupt) with the results so far, or returns them.

        Raises `InvalidArgument` (a ValueError) before any work, `EngineDead`, or `EngineClosed`.
        """
        media = {"image_data": image_data, "audio_data": audio_data, "video_data": video_data}
        call = self._preparation.generate(
            prompt, sampling_params, input_ids, rid, stream, {**media, **options}
        )
        return self._client.stream(call, owner=self) if call.streams else self._client.run(call)

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        image_data: Any = None,
        audio_data: Any = None,
        video_data: Any = None,
        *,
        stream: bool = False,
        rid: Any = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """As `generate`, without blocking the event loop; with `stream=True` gives an async iterator."""
        media = {"image_data": image_data, "audio_data": audio_data, "video_data": video_data}
        # Tokenizing many prompts takes a while; the loop goes on meanwhile.
        call = await self._client.threads.run(
            self._preparation.generate, prompt, sampling_params, input_ids, rid, stream, {**media, **options}
        )
        return (
            self._client.stream_async(call, owner=self)
            if call.streams
            else await self._client.run_async(call)
        )

    def iter(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        order: Order = "completion",
        window: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> ResultIterator:
        """Results of any number of prompts, one by one, for `for` or `async for`.

        `prompts` is any iterable, pulled from while results are taken: a list, generator, open text file or
        data set; for `async for` an asynchronous one, too. An item is a text, a list of token ids, or a dict
        with `prompt`, `input_ids` or `messages`, and with `sampling_params`, `rid` and options of its own.

        Results come as they finish, or in the order of the input with `order="input"`. Each is a dict as
        `generate` gives it, with its `index` in the input, with its `sample` where a prompt has several, and
        with `error`, which is None where all is well; here a row that fails ends no other, unless
        `on_error="raise"` asks for what `generate` does. At most `window` prompts are read and not yet
        answered and taken. Closing the iterator, or letting go of it, cancels what has not finished.

        Raises `InvalidArgument` for what holds for all, `EngineDead`, or `EngineClosed`.
        """
        rows = self.open_rows()
        return ResultIterator(rows, prompts, sampling_params, {**options}, order=order, window=window)

    def open_rows(self) -> RowRunner:
        """What reads rows and runs them one by one, for jobs that are larger than the memory."""
        return RowRunner(self.config, self._client, self._items, owner=self)

    def abort(self, rid: str = "", abort_all: bool = False) -> None:
        """End requests early; their callers get the tokens so far, with `finish_reason` type `abort`.

        Ends the request `rid` and those whose id was made of it (the rows of a batch or the samples of a
        prompt that was given this `rid`: `job` ends `job_0` and `job-a`, not `jobs`), or with `abort_all`
        every request. Ids that are not in flight are ignored.
        """
        self._client.abort(check_text("rid", rid), every=check_flag("abort_all", abort_all))

    abort_request = abort  # its name in SGLang

    def plan(self, *arguments: Any, **options: Any) -> Plan:
        """What `generate` with the same arguments would take: tokens, cache hits, time and memory.

        Runs nothing of it; the first plan measures the engine's speed (two seconds). A row is expected to
        write all that it may, or `mean_output_tokens` if it may end before. Raises `InvalidArgument`.
        """
        return self.planner.plan(*arguments, **options)

    def pause_generation(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        """Let no step run until `continue_generation`; requests may still be submitted, and wait.

        What is running is ended ("abort"), goes back to the queue, to be computed anew ("retract"), or stays
        as it is ("in_place").
        """
        self._control.pause_generation(mode)

    def continue_generation(self) -> None:
        """Go on after `pause_generation`."""
        self._control.continue_generation()

    # ── scoring ───────────────────────────────────────────────────────────────────────────────

    def score(
        self,
        query: Any = None,
        items: Any = None,
        label_token_ids: Any = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """How likely each label token comes right after the query with each item.

        `query` and `items` are texts, or rows of token ids: an item follows the query, or precedes it with
        `item_first`. `result.scores[i][j]` is the probability of `label_token_ids[j]` after item `i`; with
        `apply_softmax` the labels of an item share all of it. `temperature` (1.0) divides the logits first.

        Raises `InvalidArgument` (a ValueError), `RequestFailed`, `EngineDead`, or `EngineClosed`.
        """
        return self._scoring.run(query, items, label_token_ids, apply_softmax, item_first, **options)

    async def async_score(self, *arguments: Any, **options: Any) -> ScoreResult:
        """As `score`, with the same arguments, without blocking the event loop."""
        return await self._scoring.run_async(*arguments, **options)

    # ── conversations ─────────────────────────────────────────────────────────────────────────

    @uncollected()
    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        tools: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Any = None,
        stream: bool = False,
        rid: Any = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Answer a conversation, or a list of conversations, through the model's chat template.

        A conversation is a list of messages in OpenAI's shape: dicts with `role`, `content` (text, or parts
        of type `text`), and what the template knows besides (`tool_calls`, `name`, `reasoning_content`).
        `tools` are functions in OpenAI's shape, or Python functions with types and docstrings.
        `chat_template` is a template instead of the model's; `chat_template_kwargs` are variables for it,
        such as `enable_thinking`. With `continue_final_message` the output goes on with the last message
        instead of beginning a new one; `add_generation_prompt=False` leaves out what opens an answer.

        The rest, the result and the errors are those of `generate`.
        """
        asked = ChatOptions(
            tools, chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs
        )
        call = self._preparation.chat(messages, asked, sampling_params, rid, stream, {**options})
        return self._client.stream(call, owner=self) if call.streams else self._client.run(call)

    async def async_chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        tools: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Any = None,
        stream: bool = False,
        rid: Any = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """As `chat`, without blocking the event loop; with `stream=True` gives an async iterator."""
        asked = ChatOptions(
            tools, chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs
        )
        call = await self._client.threads.run(
            self._preparation.chat, messages, asked, sampling_params, rid, stream, {**options}
        )
        return (
            self._client.stream_async(call, owner=self)
            if call.streams
            else await self._client.run_async(call)
        )

    def open_session(
        self,
        capacity_of_str_len: int,
        session_id: str | None = None,
        streaming: bool = False,
        timeout: float | None = None,
    ) -> str | None:
        """Begin a conversation whose turns remember each other; gives its id, or None if the id is taken.

        A `generate` with `session_params={"id": …}` continues the latest finished turn, or the one named by
        `rid`; docs/sessions.md has all keys. The session holds at most `capacity_of_str_len` characters of
        prompts and outputs: a turn that would exceed it is an `InvalidArgument`. A `streaming` session only
        appends, one request at a time. A session that is idle for `timeout` seconds is closed.
        """
        return self._sessions.open(capacity_of_str_len, session_id, streaming=streaming, timeout=timeout)

    def close_session(self, session_id: str) -> None:
        """Forget a session and its turns; what runs in it goes on. An unknown id is only a warning."""
        self._sessions.close(session_id)

    # ── facts and control ─────────────────────────────────────────────────────────────────────

    @property
    def server_args(self) -> ServerArgs:
        """A copy of `config` that can be read by SGLang's names, too, and changed for another engine."""
        return ServerArgs(**vars(self.config))

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop; where there is none, one of this engine, for `loop.run_until_complete`."""
        return self._own_loop.get()

    @property
    def tokenizer_manager(self) -> TokenizerManager:
        """What SGLang's users reach under this name: tokenizer, arguments, abort and pause."""
        return TokenizerManager(self)

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers that the engine uses. Raises `InvalidArgument` if it has none."""
        if self._tokenizer is None:
            raise InvalidArgument("the engine has no tokenizer: it was made with skip_tokenizer_init=True")
        return self._tokenizer.get()

    def get_model_info(self) -> dict[str, Any]:
        """What is served: path, name, kind and version of the model."""
        return model_info(self.config, self._client.weight_version)

    def get_server_info(self) -> dict[str, Any]:
        """All arguments, with the numbers that the engine decided on, and facts on model, memory and load.

        `internal_states` has one entry; in its `memory_usage`, sizes are in GiB. After `shutdown` it has
        none, and `status` is "closed".
        """
        version = sys.modules["tokenmill"].__version__  # an import would close a circle
        return self._control.server_info(self.server_args, version, self._startup_seconds)

    def get_all_child_pids(self) -> list[int]:
        """The process of the core, if it has one of its own (`core_process`)."""
        return self._control.child_pids()

    def get_metrics(self) -> str:
        """Figures in Prometheus' text format. Raises `InvalidArgument` without `enable_metrics=True`."""
        return self._control.metrics_text()

    def flush_cache(self, *, on_error: OnError = "return") -> FlushResult:
        """Empty the prefix cache. `.success` is False, with a `.message`, while requests are in flight.

        With `on_error="raise"` that is a `WrongState` (a RuntimeError).
        """
        return self._control.flush_cache(on_error)

    def freeze_gc(self) -> None:
        """Collect garbage, then keep the collector from ever looking again at what is alive now.

        For this process, and for the core's, if it has one of its own.
        """
        self._control.freeze_gc()

    def start_profile(self, **options: Any) -> None:
        """Trace what the engine does, for Perfetto, from now until `stop_profile`.

        `output_dir` (default: $SGLANG_TORCH_PROFILER_DIR, else the system's temporary folder),
        `profile_prefix` and `profile_id` (default: the time) name the file:
        `[<prefix>-]<id>-TP-0.trace.json.gz`. `activities` is a list of "CPU", "GPU" and "MEM"; `with_stack`
        and `record_shapes` are on by default. With `num_steps` it stops by itself after so many steps;
        without, no later than after three seconds of work, because long traces take gigabytes to write. With
        `start_step` it begins when so many steps have run since the engine was made. `profile_dir` and
        `profile_name` mean `output_dir` and `profile_prefix`.

        Raises `UnknownArgument`, `InvalidArgument`, and while one is running `WrongState` (a RuntimeError).
        """
        self._control.start_profile(options)

    def stop_profile(self) -> None:
        """End the profile and write it. `WrongState` (a RuntimeError) if none runs, or writing fails."""
        self._control.stop_profile()

    # ── weights and memory ────────────────────────────────────────────────────────────────────

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        weight_version: str | None = None,
        on_error: OnError = "return",
    ) -> tuple[bool, str, int]:
        """Load the weights of another checkpoint of the same model, in place.

        Waits until all requests submitted before have finished; later ones wait and use the new weights. The
        prefix cache is emptied. Returns (success, message, number of paused requests). Where the checkpoint
        does not fit, success is False and the old weights stay; with `on_error="raise"` it is an
        `InvalidArgument`. `weight_version` is what the results of requests say that finish later.
        """
        answer = self._control.update_weights_from_disk(
            model_path, load_format, on_error, weight_version=weight_version
        )
        if answer[0]:
            path = os.fspath(model_path)
            self.config = dataclasses.replace(
                self.config,
                model_path=anchored(path),
                served_model_name=self.config.served_model_name if self._is_named else path,
                revision=None,  # it was that of the checkpoint before
            )
        return answer

    def update_weights_from_tensor(
        self,
        named_tensors: Any,
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        weight_version: str | None = None,
        on_error: OnError = "return",
    ) -> tuple[bool, str]:
        """Replace some weights in place, given as (name in checkpoints, tensor) pairs or as a dict.

        Otherwise as `update_weights_from_disk`. With `flush_cache=False` prefixes computed with the old
        weights stay in use. Returns (success, message).
        """
        return self._control.update_weights_from_tensor(
            named_tensors, load_format, flush_cache, on_error, weight_version=weight_version
        )

    def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
        """Accepted before a series of updates, as SGLang wants it; here they need no such frame."""
        check_text("selector", selector)
        return True, "weights can be updated at any time"

    def end_weight_update(self) -> tuple[bool, str]:
        """See `begin_weight_update`."""
        return True, "weights can be updated at any time"

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any] | None:
        """The first `truncate_size` rows of a weight, by its name in checkpoints, as numbers.

        None: the model has no such weight.
        """
        return self._control.get_weights_by_name(name, truncate_size)

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Free memory of the device: "weights" (to host memory), "kv_cache", "cuda_graph"; None: all.

        Graphs go in any case. The prefix cache is lost with "kv_cache". Raises `WrongState` (a RuntimeError)
        while requests are running, or wait without a pause; until all is resumed, `generate` raises it, too.
        """
        self._control.release_memory(tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take released memory back. Raises `WrongState` where there is not enough; it may be tried again."""
        self._control.resume_memory(tags)

    def shutdown(self) -> None:
        """Cancel what is in flight and free the model's memory. Idempotent; the engine is of no use then."""
        self._close()
        self._client.observers.tell()

    if not TYPE_CHECKING:  # which knows what there is

        def __getattr__(self, name: str) -> Any:
            """Raises for what is not there; for a method of SGLang's it says which feature is missing."""
            raise missing(self, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _close(client: Client, loop: OwnLoop) -> None:
    client.close()
    loop.close()
