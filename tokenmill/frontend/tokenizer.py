"""The model's tokenizer: text to ids, ids to text, and the facts that others need of it.

Wraps a tokenizer of transformers, which is imported when the first one is loaded. Chat templates stay
with that tokenizer: `get()`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import hub
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument, ModelNotFound, UnsupportedModel, told
from tokenmill.frontend.detokenizer import (
    REPLACEMENT,
    BytesDetokenizer,
    Detokenizer,
    TextStream,
    TokenBytes,
    WindowDetokenizer,
)
from tokenmill.imports import import_transformers, quick_imports
from tokenmill.messages import Request
from tokenmill.signals import HeldSignals

if TYPE_CHECKING:
    from tokenmill.sampling_params import SamplingParams

# Enough to complete a character and to know whether a space belongs before the first word.
_CONTEXT_TOKENS = 8
# Tokens that end a message although the tokenizer's `eos_token` is another one (Llama 3.1).
_END_OF_MESSAGE = ("<|eom_id|>",)
# More than most tokens have, so that the beginning of a text that is too long shows it.
_CHARACTERS_OF_TOKEN = 8
# What transformers reads of a folder before it has a tokenizer.
_JSON_FILES = (
    "config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


class Tokenizer:
    """Text to ids and back. Every method may be called from any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encoding = threading.Lock()  # transformers sets padding on the shared object before it encodes
        self.vocab_size = len(tokenizer)
        # Of a sequence, once it is known. A text with twice as many is not encoded to its end, which for one
        # of many megabytes would take minutes, and more memory than there may be.
        self.most_tokens: int | None = None
        self.eos_token_ids = _eos_token_ids(tokenizer)
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self._added = {
            token_id: (token.content, token.special)
            for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        self._special_ids = {
            content: token_id for token_id, (content, special) in self._added.items() if special
        }
        self._skipped = frozenset(self._special_ids.values())  # with `skip_special_tokens`
        self._pieces: dict[bool, TokenBytes] = _token_bytes(tokenizer, self._skipped)

    @classmethod
    def load(cls, config: EngineConfig) -> Tokenizer:
        """The tokenizer of `tokenizer_path`, or else of the model.

        Raises `ModelNotFound` if it has none, and `InvalidArgument` where its files are broken.
        """
        argument = "tokenizer_path" if config.tokenizer_path else "model_path"
        revision = None if config.tokenizer_path else config.revision
        path = config.tokenizer_path or config.model_path
        folder = hub.resolve(path, revision=revision, download_dir=config.download_dir, argument=argument)
        if not any(True for pattern in _TOKENIZER_FILES for _ in Path(folder).glob(pattern)):
            raise ModelNotFound(
                f"{path!r} has no tokenizer files; name another folder or hub id as tokenizer_path, or pass "
                "skip_tokenizer_init=True to work with input_ids and output_ids only"
            )
        # Some of what is imported ends the process if it is interrupted half-way.
        with (
            quick_imports(gpu=None if config.device == "cpu" or config.core_process else config.base_gpu_id),
            HeldSignals(),
        ):
            auto_tokenizer = import_transformers().AutoTokenizer  # which imports torch

        try:
            loaded = auto_tokenizer.from_pretrained(str(folder), trust_remote_code=config.trust_remote_code)
            loaded("", verbose=False)  # some senseless settings fail with the first text, whichever it is
        except ImportError:
            raise
        except Exception as error:  # transformers has no common base for what it raises
            raise _unusable(folder, error, trust_remote_code=config.trust_remote_code) from error
        return cls(loaded)

    def get(self) -> Any:
        """The tokenizer of transformers itself."""
        return self._tokenizer

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text, with the special tokens that the tokenizer adds by itself, or without.

        A text that is far too long for a sequence may be cut behind twice `most_tokens`.
        """
        try:
            texts = [self._beginning(text) for text in texts]
            return self._encode(texts, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise _unencodable(texts, error) from None

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        with self._encoding:
            ids = self._tokenizer(
                texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
            )["input_ids"]
        return list(ids)

    def _beginning(self, text: str) -> str:
        """The text, or a part of it with far too many tokens."""
        if self.most_tokens is None:
            return text
        length = _CHARACTERS_OF_TOKEN * 2 * self.most_tokens
        while length < len(text):
            [ids] = self._encode([text[:length]], add_special_tokens=False)
            if len(ids) >= 2 * self.most_tokens:
                return text[:length]
            length *= 4
        return text

    def decode_batch(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Text of each sequence as transformers decodes it."""
        decode = self._decode_skipping if skip_special_tokens else self._decode_all
        return [decode(ids) for ids in token_ids]

    def token_text(self, token_id: int) -> str:
        """The text of a single token, special ones included."""
        return self._decode_all([token_id])

    def open_text(self, request: Request) -> TextStream:
        """The growing text of a request, with its stop strings and patterns.

        Raises `InvalidArgument` for a pattern that cannot be searched for.
        """
        params = request.params
        special_stops = {}
        if params.skip_special_tokens:
            ids = ((self._special_ids.get(stop), stop) for stop in params.stop)
            special_stops = {token_id: stop for token_id, stop in ids if token_id is not None}
        return TextStream(
            self._detokenizer(request),
            params.stop,
            params.stop_regex,
            special_stops=special_stops,
            keep_stop=params.no_stop_trim,
        )

    def texts(self, finished: Sequence[tuple[Request, Sequence[int]]]) -> list[str]:
        """Whole texts of finished requests without such stops: what their streams would have given.

        The ids are those of the output, less a stop token that does not belong to the text.
        """
        if self._pieces:
            return [_whole(self._detokenizer(request), ids) for request, ids in finished]
        return [self._whole_by_decoding(request, ids) for request, ids in finished]

    def _whole_by_decoding(self, request: Request, ids: Sequence[int]) -> str:
        params = request.params
        context = self._context(request)
        both, before = self.decode_batch(
            [[*context, *ids], context], skip_special_tokens=params.skip_special_tokens
        )
        # Characters that are not whole, and special tokens without spaces, need a closer look.
        if REPLACEMENT in both or not both.startswith(before) or self._adjoining(params):
            return _whole(self._detokenizer(request), ids)
        return both[len(before) :]

    def _detokenizer(self, request: Request) -> Detokenizer:
        params = request.params
        context = self._context(request)
        if self._pieces:
            return BytesDetokenizer(self._pieces[params.skip_special_tokens], context)
        decode = self._decode_skipping if params.skip_special_tokens else self._decode_all
        return WindowDetokenizer(decode, context, adjoining=self._adjoining(params))

    def _context(self, request: Request) -> list[int]:
        """The prompt's last tokens; where they would all be skipped, the last that are not."""
        tail: list[int] = request.prompt_ids[-_CONTEXT_TOKENS:].tolist()
        if not request.params.skip_special_tokens or not self._skipped.issuperset(tail):
            return tail
        return [token for token in request.prompt_ids.tolist() if token not in self._skipped][
            -_CONTEXT_TOKENS:
        ]

    def _adjoining(self, params: SamplingParams) -> Mapping[int, str]:
        if params.skip_special_tokens or params.spaces_between_special_tokens:
            return {}
        return {token_id: content for token_id, (content, _) in self._added.items()}

    def _decode_skipping(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids, skip=True)

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids, skip=False)

    def _decode(self, token_ids: Sequence[int], *, skip: bool) -> str:
        # Models round their vocabulary up; slow tokenizers fail on ids that they do not have. Cleaning up
        # spaces would change text that was streamed already.
        known = [token_id for token_id in token_ids if token_id < self.vocab_size]
        text: str = self._tokenizer.decode(
            known, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        return text


def _whole(detokenizer: Detokenizer, token_ids: Sequence[int]) -> str:
    return detokenizer.push(token_ids) + detokenizer.finish()


def _eos_token_ids(tokenizer: Any) -> tuple[int, ...]:
    added = tokenizer.get_added_vocab()
    ids = [tokenizer.eos_token_id, *(added.get(token) for token in _END_OF_MESSAGE)]
    return tuple(token_id for token_id in ids if token_id is not None)


def _unencodable(texts: Sequence[str], error: Exception) -> Exception:
    """The error for the first text that is no valid Unicode; `error` itself if all are."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as place:
            return InvalidArgument(
                f"prompt[{index}] is not valid Unicode: it has the lone surrogate {text[place.start]!r} at "
                f"position {place.start}; decode bytes with errors='replace' to avoid it"
            )
    return error


# ── files that make no tokenizer ──────────────────────────────────────────────────────────────


def _unusable(folder: Path, error: Exception, *, trust_remote_code: bool) -> InvalidArgument:
    """The error for a tokenizer that transformers cannot load; it names the file at fault if that shows."""
    for name in _JSON_FILES:
        hub.read_json(folder / name)  # raises
    for template in folder.glob("*.jinja"):
        hub.read_text(template)
    from tokenizers import Tokenizer as Backend

    problem = told(error)
    auto_config = import_transformers().AutoConfig
    read_config = partial(auto_config.from_pretrained, trust_remote_code=trust_remote_code)
    if problem == _problem(read_config, folder):  # it is read before the tokenizer
        return UnsupportedModel(
            f"{folder / 'config.json'}: this is not a valid configuration: {problem}; correct the file"
        )
    files = sorted({path.name for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)})
    if "tokenizer.json" in files and (own_problem := _problem(Backend.from_file, folder / "tokenizer.json")):
        files, problem = ["tokenizer.json"], own_problem
    return InvalidArgument(
        f"{' or '.join(files)} in {folder} cannot be used: {problem}. Repair or fetch it again, name another "
        "folder or hub id as tokenizer_path, or pass skip_tokenizer_init=True to work with input_ids and "
        "output_ids only"
    )


def _problem(read: Callable[[str], Any], path: Path) -> str | None:
    """How reading fails; None if it does not."""
    try:
        read(str(path))
    except Exception as error:
        return told(error)
    return None


# ── what a token is in bytes ──────────────────────────────────────────────────────────────────


def _token_bytes(tokenizer: Any, special_ids: frozenset[int]) -> dict[bool, TokenBytes]:
    """Bytes of tokens, {True: without special tokens, False: with them}; {} if tokens are not bytes."""
    if not tokenizer.is_fast or tokenizer.backend_tokenizer.decoder is None:
        return {}
    steps = _steps(json.loads(tokenizer.backend_tokenizer.decoder.__getstate__()))
    to_bytes = _reader(steps)
    if to_bytes is None:
        return {}
    token_of = tokenizer.backend_tokenizer.id_to_token
    strips = steps[-1]["type"] == "Strip"

    def compute(token_id: int, *, skip: frozenset[int]) -> bytes:
        token = None if token_id in skip else token_of(token_id)
        return b"" if token is None else to_bytes(token)

    return {
        skips: TokenBytes(
            partial(compute, skip=special_ids if skips else frozenset()), strips_first_space=strips
        )
        for skips in (True, False)
    }


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoders that a sequence runs one after the other."""
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _reader(steps: list[dict[str, Any]]) -> Callable[[str], bytes] | None:
    """How a token's name becomes bytes under these decoders; None for decoders that do more than that."""
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return _byte_level
    if names not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return None
    replace, strip = steps[0], steps[-1]
    if set(replace["pattern"]) != {"String"}:
        return None
    if strip["type"] == "Strip" and (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
        return None
    return partial(_byte_fallback, mark=replace["pattern"]["String"], space=replace["content"])


def _byte_alphabet() -> dict[int, int]:
    """Byte-level BPE names a byte by a printable character: itself, or one from U+0100 on.

    Gives the byte of each character; other characters below U+0100 become one that is no byte.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    named = {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}
    return dict.fromkeys(others, 0xFFFF) | named


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()  # an added token, written as it is


def _byte_fallback(token: str, *, mark: str, space: str) -> bytes:
    token = token.replace(mark, space)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.encode()
