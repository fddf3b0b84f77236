"""What a finished sample is known by: a digest of all that its answer depends on, and of nothing else.

Owns which arguments, parameters and files change an answer, and the seeds of rows without one of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tokenmill import hub
from tokenmill.batch import processor_keys
from tokenmill.batch.key_table import KEY_BYTES
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument
from tokenmill.frontend.seeds import sample_seed
from tokenmill.frozen import lightly_frozen
from tokenmill.messages import LogprobOptions, Request
from tokenmill.sampling_params import SamplingParams, show

# Arguments of the engine on which answers depend, besides the files of model and tokenizer. The others say
# where and how fast it runs, or act through the requests.
CHANGING_ARGUMENTS = (
    "skip_tokenizer_init",
    "load_format",
    "dtype",
    "enable_deterministic_inference",
    "json_model_override_args",
    "weight_version",
    "logprobs_ignore_temperature",
    "grammar_backend",
    "constrained_json_disable_any_whitespace",
    "constrained_json_whitespace_pattern",
)
# The number of samples and seeds are part of a sample's own key; what is resolved is taken from the request.
_PARAMS_APART = {"n", "sampling_seed", "stream_interval", "max_new_tokens", "stop_token_ids", "ignore_eos"}
_PARAMS = [
    (field.name, field.default)
    for field in dataclasses.fields(SamplingParams)
    if field.name not in _PARAMS_APART
]
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "*token*",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
)
_SAMPLE_BYTES = 64
_SAMPLES = 4  # of each tensor
_MOST_HEADER_BYTES = 2**27


@lightly_frozen()
class RowKey:
    """Digest and first seed of a row; its samples are told apart by their number."""

    digest: bytes
    seed: int
    is_greedy: bool

    def sample(self, number: int) -> bytes:
        """The key of a sample. Where nothing is drawn, all samples are the same one."""
        if number == 0 or self.is_greedy:
            return self.digest
        return _digest(self.digest, number.to_bytes(8, "little"))


class Keys:
    """Keys and seeds of the rows of one job."""

    def __init__(self, model: bytes, *, seed: int) -> None:
        """`model` is a `fingerprint`; `seed` is the job's, for rows without a `sampling_seed`."""
        self.model = model
        self._seed = seed.to_bytes(9, "little", signed=True)
        self._known: tuple[Request | None, bytes] = (None, b"")
        # Rows mostly share one, whose code takes a while to read.
        self._processor_digest = cache(_processor_digest)

    def of(self, requests: Sequence[Request]) -> RowKey:
        """The key of a row, from its requests as they were read."""
        first = requests[0]
        prompt = np.ascontiguousarray(first.prompt_ids, "<i4").tobytes()
        rest = self._settings(first)
        content = _digest(self.model, len(prompt).to_bytes(8, "little"), prompt, rest)
        if first.params.is_greedy:
            return RowKey(content, 0, is_greedy=True)
        if first.params.sampling_seed is None:
            seed = int.from_bytes(_digest(content, self._seed)[:8], "little")
        else:
            seed = first.seed
        return RowKey(_digest(content, seed.to_bytes(8, "little")), seed, is_greedy=False)

    def _settings(self, request: Request) -> bytes:
        """What a request asks for, as text; rows that follow each other mostly ask for the same."""
        known, text = self._known
        if known is None or not _asks_the_same(known, request):
            processor = None if request.processor is None else self._processor_digest(request.processor)
            text = _settings_text(request, processor).encode(errors="surrogatepass")
        self._known = (request, text)  # rows that are read together share their parameters
        return text


def seeded(requests: Sequence[Request], key: RowKey) -> tuple[Request, ...]:
    """The requests of a row with the seeds of its key; where nothing is drawn, any seeds will do."""
    if key.is_greedy or requests[0].seed == key.seed:  # as it was written
        return tuple(requests)
    return tuple(
        request.copy(id=request.id, seed=sample_seed(key.seed, number))
        for number, request in enumerate(requests)
    )


def fingerprint(config: EngineConfig, *, dtype: str, tensor_update: str = "") -> bytes:
    """What model answers: its arguments, small files whole, weights by their headers and some of each tensor.

    `dtype` is the one that was resolved; `tensor_update` a word for weights that are in no file. Reads some
    kilobytes of each file of weights, not all of them.
    """
    arguments = {name: getattr(config, name) for name in CHANGING_ARGUMENTS} | {"dtype": dtype}
    if tensor_update:
        arguments["tensor_update"] = tensor_update
    digest = hashlib.blake2b(
        json.dumps(arguments, sort_keys=True, default=repr).encode(), digest_size=KEY_BYTES
    )
    # The revision is the model's; a tokenizer from elsewhere is of its repository's newest.
    model = config.model_path, config.revision
    tokenizer = (config.tokenizer_path, None) if config.tokenizer_path else model
    for name, revision in dict.fromkeys((model, tokenizer)):
        folder = hub.resolve(name, revision=revision, download_dir=config.download_dir)
        for path in sorted(folder.iterdir()):
            if path.is_file() and (parts := _identity(path)) is not None:
                for part in (path.name.encode(), path.stat().st_size.to_bytes(8, "little"), *parts):
                    digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _identity(path: Path) -> Iterator[bytes] | None:
    """What to look at in a file of a model; None: it changes nothing."""
    if path.suffix == ".safetensors":
        return _weights_identity(path)
    if any(fnmatch(path.name, pattern) for pattern in _TEXT_FILES):
        return iter([path.read_bytes()])
    return None


def _weights_identity(path: Path) -> Iterator[bytes]:
    """The header, and a few bytes of each tensor: checkpoints of one architecture have the same headers."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, _MOST_HEADER_BYTES))
        yield header
        try:
            tensors = json.loads(header)
            ranges = sorted(
                entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__"
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return  # the loader has its own opinion of such a file
        for start, end in ranges:
            yield _samples(file, 8 + length + start, end - start)


def _samples(file: BinaryIO, start: int, size: int) -> bytes:
    parts = []
    for number in range(_SAMPLES):
        file.seek(start + size * (2 * number + 1) // (2 * _SAMPLES))
        parts.append(file.read(min(_SAMPLE_BYTES, size)))
    return b"".join(parts)


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=KEY_BYTES).digest()


def _asks_the_same(one: Request, other: Request) -> bool:
    """Whether two requests certainly have the same settings; False may also mean that it takes too long."""
    return (
        # Equal is not the same in what may be any JSON: 1 == True.
        (one.params is other.params or (one.params == other.params and not one.params.custom_params))
        and one.max_new_tokens == other.max_new_tokens
        and one.stop_ids == other.stop_ids
        and one.grammar is other.grammar
        and one.processor is other.processor
        and one.logprobs is other.logprobs is None
        and one.hidden_states == other.hidden_states
    )


def _settings_text(request: Request, processor: bytes | None) -> str:
    """Everything but the prompt and the seed that the answer depends on; `processor` is a digest."""
    params = {name: value for name, default in _PARAMS if (value := getattr(request.params, name)) != default}
    if "custom_params" in params:  # any JSON: the same whatever the order of its keys
        params["custom_params"] = json.dumps(params["custom_params"], sort_keys=True)
    if "logit_bias" in params:  # all are added, in whatever order
        params["logit_bias"] = tuple(sorted(params["logit_bias"]))
    return repr(
        (
            sorted(params.items()),
            request.max_new_tokens,
            request.stop_ids,
            _logprobs_text(request.logprobs),
            request.hidden_states,
            request.grammar and (request.grammar.kind, request.grammar.text),
            processor,
        )
    )


def _logprobs_text(asked: LogprobOptions | None) -> tuple[Any, ...] | None:
    return None if asked is None else dataclasses.astuple(asked)


def _processor_digest(processor: Any) -> bytes:
    """A processor by its code and its state, which must be the same in the next process."""
    try:
        return _digest(processor_keys.identity(processor))
    except Exception as error:
        raise InvalidArgument(
            f"custom_logit_processor: the journal must know {show(processor.call)} again, but it holds what "
            f"cannot be pickled ({error}); leave that out of __getstate__, or make it when it is called"
        ) from error
