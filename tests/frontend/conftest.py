"""A core without a model, which repeats the prompt as its answer, and tokenizers of every kind."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.config import EngineConfig
from tokenmill.core.plan import SchedulerLimits
from tokenmill.core.policy import create_policy
from tokenmill.core.scheduler import Scheduler
from tokenmill.errors import EngineClosed, EngineDead
from tokenmill.frontend.tokenizer import Tokenizer
from tokenmill.kvcache import Cache
from tokenmill.messages import EngineFacts, Finish, Output, Request, StepResult
from tokenmill.sampling_params import SamplingParams

EOS = 257
FACTS = EngineFacts(
    architecture="Echo",
    device="cpu",
    device_name="none",
    dtype="float32",
    attention_backend="none",
    vocab_size=300,
    hidden_size=1,
    num_layers=1,
    num_parameters=1,
    context_length=100_000,
    max_sequence_tokens=100_000,
    max_total_num_tokens=100_000,
    page_size=16,
    max_running_requests=64,
    max_step_tokens=8192,
    steps_in_flight=1,
    eos_token_ids=(EOS,),
    weight_bytes=2**30,
    cache_bytes=2**29,
    load_seconds=0.0,
)


# ── the core ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Running:
    request: Request
    answer: list[int]
    position: int = 0
    num_told: int = 0
    unreported: list[int] = field(default_factory=list)


class EchoCore:
    """Answers a prompt with its own tokens, one per step and request, then the end-of-text token.

    `gate` holds it before a step (set: it runs). `die(error)` ends its loop.
    """

    def __init__(
        self, deliver: Callable[..., None], died: Callable[..., None], gate: threading.Event
    ) -> None:
        self.facts = FACTS
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.closed = False
        self.need = "none"
        self.gate = gate
        self._deliver = deliver
        self._died = died
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        self._put("submit", list(requests))

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._put("cancel", list(request_ids))

    def call(self, name: str, **arguments: Any) -> Any:
        if name == "state":
            numbers = ("running", "waiting", "used_tokens", "cached_tokens", "cache_bytes", "graph_bytes")
            rest = {"last_gen_throughput": 0.0, "device_seconds": None, "paused": False, "released": []}
            return dict.fromkeys(numbers, 0) | rest
        assert name == "flush_cache"
        return (not self._running, "busy" if self._running else "empty")

    def close(self) -> None:
        self.closed = True
        self.gate.set()
        self._inbox.put(("close", None))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def die(self, error: BaseException) -> None:
        self._inbox.put(("die", error))
        self.gate.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _put(self, kind: str, value: Any) -> None:
        if self.closed:
            raise EngineClosed("closed")
        if self._error is not None:
            raise EngineDead("dead") from self._error
        self._inbox.put((kind, value))

    def _run(self) -> None:
        try:
            while self._drain():
                outputs = [out for running in list(self._running.values()) for out in self._step(running)]
                if outputs:
                    self._deliver(outputs)
        except BaseException as error:
            self._error = error
            self._died(error)

    def _drain(self) -> bool:
        while True:
            if not self._inbox.empty() or not self._running:
                kind, value = self._inbox.get()
            else:
                self.gate.wait()
                if self._inbox.empty():
                    return True
                continue
            if kind == "close":
                return False
            if kind == "die":
                raise value
            if kind == "submit":
                self.submitted += value
                self._running |= {request.id: _Running(request, answer(request)) for request in value}
            else:
                self.cancelled += value
                ended = [running for name in value if (running := self._running.pop(name, None))]
                self._deliver([_output(running, Finish("abort", message="cancelled")) for running in ended])

    def _step(self, running: _Running) -> Iterator[Output]:
        request, token = running.request, running.answer[running.position]
        running.position += 1
        running.unreported.append(token)
        finish = None
        if token in request.stop_ids:
            finish = Finish("stop", matched=token)
        elif running.position == request.max_new_tokens:
            finish = Finish("length", length=request.max_new_tokens)
        if finish is not None:
            del self._running[request.id]
        # The first token is told at once, as the true core does.
        interval = request.report_interval if running.num_told else min(1, request.report_interval)
        if finish is not None or (interval and len(running.unreported) >= interval):
            yield _output(running, finish)


def answer(request: Request) -> list[int]:
    """The prompt and the end of text, over and over if that is ignored."""
    once = [*request.prompt_ids.tolist(), EOS]
    return once * (1 + request.max_new_tokens // len(once))


def _output(running: _Running, finish: Finish | None) -> Output:
    tokens, running.unreported = running.unreported, []
    running.num_told += len(tokens)
    return Output(running.request.id, tuple(tokens), finish, cached_tokens=3, num_retractions=1)


@pytest.fixture
def gate() -> threading.Event:
    """Lets the echo cores run; set at the start."""
    event = threading.Event()
    event.set()
    return event


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> Iterator[list[EchoCore]]:
    """Every engine gets an echo core; they are listed in the order in which they were made."""
    made: list[EchoCore] = []

    def start(config: EngineConfig, *, deliver: Any, died: Any) -> EchoCore:
        made.append(EchoCore(deliver, died, gate))
        return made[-1]

    monkeypatch.setattr("tokenmill.core.launch.start_core", start)
    yield made
    for core in made:
        core.close()


# ── tokenizers ────────────────────────────────────────────────────────────────────────────────

# ruff: noqa: RUF001 (other scripts are meant)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, my name is Ada!",
    "Grüße aus Köln, où est la bibliothèque? ¿Qué tal, señor?",
    "你好，世界。今天天气很好。你好你好。日本語のテキスト。",
    "👩‍👩‍👧‍👦 🎉🎉 😀😃😄 👍🏽",
    "Привет, мир! Γειά σου Κόσμε. مرحبا بالعالم नमस्ते दुनिया",
]


def _wrap(tokenizer: Any) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
        )
    )


def byte_tokens() -> Any:
    """Token i is byte i; 256 is <s>, 257 </s>, 258 <pad>."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = byte_alphabet()
    backend = Backend(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    return backend


def byte_alphabet() -> list[str]:
    """The character that names each byte: itself if it can be seen, else one from U+0100 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


def byte_level_tokens() -> Any:
    """Byte-level BPE with merges, special tokens, and an added token that is not special."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<pad>", "<|é|>"],
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool call>"])
    return backend


def byte_fallback_tokens() -> Any:
    """SentencePiece's way: words with a mark before them, and single bytes for what has no token."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "▁", *"abcdeflorstTH.,你好é"]
    merges = [("▁", "T"), ("▁", "f"), ("l", "o"), ("o", "r"), ("▁f", "or"), ("▁", "▁")]
    vocab = {piece: index for index, piece in enumerate([*pieces, *("".join(merge) for merge in merges)])}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    return backend


def word_piece_tokens() -> Any:
    """BERT's way: pieces of words, the later ones with ##."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    pieces = ["[UNK]", "hello", "world", "##ly", "##s", "un", "##do", ".", ",", "é", "你", "don", "'", "t"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    return backend


def metaspace_tokens() -> Any:
    """T5's way: SentencePiece without bytes."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    pieces = ["<unk>", "▁", "▁the", "▁cat", "s", "a", "▁a", "你好", ".", "▁▁"]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    return backend


KINDS: dict[str, Callable[[], Any]] = {
    "bytes": byte_tokens,
    "byte level": byte_level_tokens,
    "byte fallback": byte_fallback_tokens,
    "word piece": word_piece_tokens,
    "metaspace": metaspace_tokens,
}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    """A tokenizer of each kind."""
    return {kind: _wrap(make()) for kind, make in KINDS.items()}


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory, tokenizers: dict[str, Tokenizer]) -> Path:
    """A model folder with the byte tokenizer and nothing else."""
    folder = tmp_path_factory.mktemp("bytes")
    tokenizers["bytes"].get().save_pretrained(folder)
    return folder


@pytest.fixture
def config(byte_folder: Path) -> EngineConfig:
    return EngineConfig(model_path=str(byte_folder))


def make_request(
    prompt_ids: Sequence[int] = (104, 105), *, request_id: str = "r", report_interval: int = 1, **params: Any
) -> Request:
    """A request as the reader would make it."""
    sampling = SamplingParams(**params)
    return Request(
        id=request_id,
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
        params=sampling,
        max_new_tokens=sampling.max_new_tokens or 0,
        seed=0,
        stop_ids=() if sampling.ignore_eos else (EOS,),
        report_interval=report_interval,
    )


@pytest.fixture(scope="session", name="make_request")
def make_request_fixture() -> Callable[..., Request]:
    return make_request


@pytest.fixture
def core_steps() -> Callable[..., int]:
    """`core_steps([(prompt tokens, new tokens), …])`: the steps that a scheduler plans for such rows.

    It has 8 rows, 64 tokens a step, and 400 pages of 4 tokens, and no two prompts have the same beginning.
    """

    def count(rows: Sequence[tuple[int, int]]) -> int:
        cache = Cache(num_pages=400, page_size=4)
        limits = SchedulerLimits(max_rows=8, max_step_tokens=64, max_sequence_tokens=80)
        scheduler = Scheduler(limits, cache=cache, policy=create_policy("fcfs", cache))
        for index, (prompt, new) in enumerate(rows):
            ids = np.array([index, *[0] * (prompt - 1)], dtype=np.int32)
            params = SamplingParams(max_new_tokens=new)
            scheduler.submit([Request(str(index), ids, params, new, 0, (), 0)])
        steps = 0
        while (plan := scheduler.plan_step()) is not None:
            scheduler.settle()
            scheduler.take_in(StepResult(np.where(plan.samples, 1, -1).astype(np.int32)))
            steps += 1
        return steps

    return count
