"""A first run of a small model of the same kind, while the weights of the real one are still on their way.

It compiles the kernels side by side, and measures what the largest step takes beside weights and pool.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np
import torch

from tokenmill.attention.triton_backend import MANY_TOKENS
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidArgument
from tokenmill.kernels.compilation import ParallelCompilation, compiler_facts
from tokenmill.kernels.compilers import Compilers
from tokenmill.kernels.launching import measured, on_processors
from tokenmill.kernels.linear import compile_tilings
from tokenmill.kernels.sharing import MANY_HEADS, MOST_HEADS, most_pieces
from tokenmill.kvcache.pool import PagePool
from tokenmill.messages import IntArray, StepPlan
from tokenmill.models import ModelSpec, build_model
from tokenmill.runner.batch import Rows
from tokenmill.runner.capture import lane_sizes
from tokenmill.runner.eager import EagerSteps
from tokenmill.runner.executor import Executor, layer_shapes
from tokenmill.runner.graphs import Forwarded, decode_draw, decode_forward, decode_logits
from tokenmill.runner.hardware import Placement
from tokenmill.runner.mailbox import Mailbox
from tokenmill.runner.prompt_graphs import PROMPTS_OF_LONG, StepShape, prompt_step, spare_inputs
from tokenmill.runner.quarantine import Quarantine
from tokenmill.runner.recorder import SHORT_KEYS, StepKind
from tokenmill.sampling import SamplingNeeds
from tokenmill.sampling.masks import apply_host_masks, apply_masks

_log = logging.getLogger("tokenmill")

# Steps as (rows that decode, (tokens computed now, tokens before them) of every row). Kernels choose their
# tiles by the longest run of tokens, and may choose by whether there is something before it. Those for long
# runs take longest to compile, so they come first.
_STEPS: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = (
    (0, ((1024, 0),)),
    (0, ((512, 16),)),
    (0, ((64, 512),)),
    (0, ((512, 0),)),
    (0, ((64, 0),)),
    (0, ((2, 16), (2, 0))),
    (0, ((2, 0),)),
    (1, ((1, 16), (2, 0))),
)
# So many tokens that its kernels are those of longer prompts, too, and not those for a few rows.
_SHORT_PROMPT = ((16, 0),)
# Products in graphs choose their tiles by the number of rows in this measure, also those of short prompts.
_TILED = (16, 32, 64, 128, 192, 256)
# With more than these, queries, keys and values of rows may go by tiles that prompts have no use for.
_FEW_TILED = 32
_PLAIN = SamplingNeeds(random=True, filters=False)
_FILTERED = SamplingNeeds(random=True, filters=True)
# Of the free memory, what the largest step may take; the pages of the pool share the rest.
_MOST_OF_FREE_MEMORY = 0.25


class Scout:
    """Two layers of each kind, all weights zero, and a pool of one page.

    Its steps launch the kernels of the real model's steps, through the same code.
    """

    _is_first: ClassVar[bool] = True  # of this process

    def __init__(
        self, spec: ModelSpec, *, config: EngineConfig, placement: Placement, compilers: Compilers
    ) -> None:
        self._placement = placement
        self._context_length = spec.context_length
        # The fewest rows whose pieces are put together by smaller programs, and by those for several heads.
        num_heads = max(layer.num_heads for layer in spec.attention)
        self._many_rows, self._most_rows = -(-MANY_HEADS // num_heads), -(-MOST_HEADS // num_heads)
        self._may_have_grammars = placement.attention_backend == "triton" and not config.skip_tokenizer_init
        # Two, because only the first layer has none before it.
        layers = tuple(dict.fromkeys(spec.attention)) * 2
        small = dataclasses.replace(spec, num_layers=len(layers), attention=layers)
        pool = PagePool(
            layer_shapes(layers),
            num_pages=1,
            page_size=config.page_size,
            dtype=placement.dtype,
            device=placement.device,
        )
        model = build_model(small, dtype=placement.dtype, device=placement.device)
        for weight in model.parameters():
            weight.zero_()
        self._executor = Executor(
            model,
            layers,
            backend=placement.attention_backend,
            pool=pool,
            deterministic=placement.deterministic,
        )
        most_rows = max((placement.max_running_requests, *_TILED))
        self._rows = Rows(
            num_slots=most_rows,
            num_columns=-(-spec.context_length // config.page_size),
            num_groups=1 + max(layer.group for layer in layers),
            page_size=config.page_size,
            spare_page=0,
            vocab_size=spec.vocab_size,
            device=placement.device,
            sharing=self._executor.sharing,
        )
        self._quarantine = Quarantine(self._rows, placement.device)
        self._steps = EagerSteps(self._executor, self._rows, self._quarantine)
        self._mailbox = Mailbox(num_lines=self._rows.num_inputs, most_rows=most_rows, device=placement.device)
        facts = repr((spec, _kernel_choices(placement), config.page_size, self._may_have_grammars))
        self._has_all_on_disk = compilers.has_all(facts)
        # Kernels that an earlier engine of this process has loaded would be missing in what is remembered.
        is_remembered = Scout._is_first and not self._has_all_on_disk
        Scout._is_first = False
        self._compilation = ParallelCompilation(
            placement.device, compilers=compilers, facts=facts if is_remembered else None
        )

    def compile(self) -> ParallelCompilation:
        """Start to compile what the model's steps launch.

        Where an earlier start left all of it on the disk, only what the largest step needs is looked for, as
        it is measured: a launch takes milliseconds to load what it lacks, and looking for all half a second.

        What reads rows comes first, because it is waited for. The kernels of a short prompt compile while the
        others are found: it is what many engines begin with. Of the others, what takes longest comes first:
        kernels for prompts, then those that draw under filters. Where they are on the disk, threads that load
        them while they are found take twice the time of this one.
        """
        compilation = self._compilation
        with compilation.cancelled_by_failure():
            if self._has_all_on_disk:
                self._rows.read(self._rows.spare_inputs(1))  # not skipped when what it reads are indices
            else:
                self._find()
        return compilation

    def _find(self) -> None:
        compilation = self._compilation
        with compilation:
            self._rows.read(self._rows.spare_inputs(1))
        reading = compilation.jobs
        with compilation:
            self._run(_plan(self._within_context(_SHORT_PROMPT)))
        with compilation.held():
            self._find_others(reading)
        _log.debug("compiling %d kernels", compilation.num_kernels)

    def _find_others(self, reading: Sequence[Future[Any]]) -> None:
        """All but the steps of a short prompt; `reading` is the kernel that reads rows."""
        compilation = self._compilation
        with compilation:
            for num_decodes, rows in _STEPS:
                self._run(_plan(self._within_context(rows), num_decodes=num_decodes))
        # The steps below use what this kernel reads as indices, so it must not be skipped any more.
        for job in reading:
            job.result()
        with compilation:
            self._mailbox.take(1)
            most = self._placement.max_running_requests
            for size in (1, most):
                self._decode(size, StepKind(), _FILTERED)
                self._decode(size, StepKind(longest=SHORT_KEYS))
            for size in sorted({1, min(self._many_rows, most), most}):
                self._decode(size, StepKind(max_pieces=most_pieces(size)))
            powers = (2**power for power in range(most.bit_length()))
            for size in sorted({*powers, most, *_TILED}):
                self._decode(size, StepKind())
            if not self._placement.deterministic:
                self._prefill_few()
                self._prefill_many()
                compile_tilings(self._placement.dtype, self._placement.device)
            if self._may_have_grammars:
                self._mask()

    def find_beside(self, num_processors: int) -> ParallelCompilation:
        """What decode steps launch in addition that have only so many multiprocessors; to be compiled yet."""
        beside = ParallelCompilation(self._placement.device, after=self._compilation)
        most = self._placement.max_running_requests
        with beside, on_processors(num_processors):
            for size in sorted(set(lane_sizes(most)) & {*_TILED, most}):
                self._forward(size, StepKind())
        _log.debug("%d more kernels beside prompts", beside.num_kernels)
        return beside

    def measure(self, max_step_tokens: int) -> int:
        """Bytes that the largest steps take while they run; what is still compiled need not run for that."""
        with self._compilation:
            return self._measure(max_step_tokens)

    def _measure(self, max_step_tokens: int) -> int:
        device = self._placement.device
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with measured():
            self._fill_a_step(max_step_tokens)
        most = self._placement.max_running_requests
        self._decode(most, StepKind(max_pieces=most_pieces(most)), _FILTERED)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    def _fill_a_step(self, tokens: int) -> None:
        """Prompts as long as can be, and logits for as many rows as can be."""
        max_rows = self._placement.max_running_requests
        longest = min(self._context_length, tokens)
        lengths = [longest] * (tokens // longest) + [tokens % longest] * bool(tokens % longest)
        step = self._rows.stage(_plan([(length, 0) for length in lengths[:max_rows]]))
        hidden_TD = self._executor.forward(step.token_ids_T, step.layout)
        self._executor.logits(hidden_TD[:max_rows]).float()  # as the masking of stop tokens does

    def _run(self, plan: StepPlan) -> None:
        self._steps.draw(self._steps.forward(plan), plan, None)
        for failure in self._quarantine.losses.failures.values():  # no row of a real step would fare better
            raise RuntimeError(failure.message)
        self._forget_tokens()

    def _decode(self, size: int, kind: StepKind, needs: SamplingNeeds = _PLAIN) -> None:
        """A step as it is captured; the torch backend, which cannot be, has no kernels to compile either."""
        if self._placement.attention_backend != "triton":
            return
        decode_draw(self._executor, self._rows, self._forward(size, kind), needs, self._mailbox)
        self._forget_tokens()

    def _forward(self, size: int, kind: StepKind) -> Forwarded:
        return decode_forward(self._executor, self._rows, self._rows.spare_inputs(size), kind)

    def _prefill_few(self) -> None:
        """Short steps of a prompt: the product before its attention may be of another kind than in decode."""
        for size in _TILED:
            if _FEW_TILED < size <= self._placement.max_step_tokens:
                self._prefill(size, 1)

    def _prefill_many(self) -> None:
        """Steps so long that the last tokens of their prompts are read as rows are, and pieces put together.

        A graph has room for more prompts than may run; without one there are as many as there are.
        """
        if self._placement.max_step_tokens < MANY_TOKENS:
            return
        most = self._placement.max_running_requests
        smaller = (0, *PROMPTS_OF_LONG[:-1])
        rooms = (size for size, below in zip(PROMPTS_OF_LONG, smaller, strict=True) if below <= most)
        for size in sorted({*rooms, min(self._many_rows, most), min(self._most_rows, most)}):
            self._prefill(max(MANY_TOKENS, size), size)

    def _prefill(self, num_tokens: int, num_prompts: int) -> None:
        """A step of so many prompts as it is captured, all on the spare row; see `_decode`."""
        if self._placement.attention_backend != "triton":
            return
        shape = StepShape(
            tokens=num_tokens,
            decodes=0,
            prompts=num_prompts,
            long_queries=False,
            long_prefixes=False,
            kind=StepKind(SHORT_KEYS),
        )
        inputs = self._rows.to_device(spare_inputs(shape, self._rows.spare_slot))
        prompt_step(self._executor, self._rows, inputs, shape)

    def _mask(self) -> None:
        """Masks as grammars want them; the smallest step knows the kernel for all of them."""
        forwarded = decode_forward(self._executor, self._rows, self._rows.spare_inputs(1), StepKind())
        logits_RV = decode_logits(self._executor, forwarded).logits_QV
        num_words = -(-logits_RV.shape[1] // 32)
        bits_MW = torch.full((1, num_words), -1, dtype=torch.int32, device=logits_RV.device)
        apply_masks(logits_RV, torch.zeros(1, dtype=torch.int64, device=logits_RV.device), bits_MW)
        nowhere_3 = torch.zeros(3, dtype=torch.int64, device=logits_RV.device)
        for logits in (logits_RV, logits_RV.float()):  # as penalties leave them
            apply_host_masks(logits, nowhere_3)

    def _forget_tokens(self) -> None:
        """Where the kernel that draws was skipped, its "tokens" are no ids of the vocabulary."""
        self._rows.state.last_token_S.zero_()

    def _within_context(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        fitting = []
        for count, before in rows:
            start = min(before, self._context_length - 1)
            fitting.append((min(count, self._context_length - start), start))
        return fitting


def _kernel_choices(placement: Placement) -> list[object]:
    """What decides which kernels there are, beside the model."""
    return [
        placement.device_name,
        placement.dtype,
        placement.attention_backend,
        placement.max_running_requests,
        placement.max_step_tokens,
        placement.deterministic,
        compiler_facts(),
    ]


def fit_step(scout: Scout, placement: Placement) -> tuple[Placement, int]:
    """The placement with the largest step that leaves room for pages, and the bytes that the step takes."""
    while True:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(placement.device)
        step_bytes = _measured(scout, placement.max_step_tokens)
        if step_bytes is not None and step_bytes <= _MOST_OF_FREE_MEMORY * free:
            return placement, step_bytes
        smaller = max(placement.max_step_tokens // 2, placement.max_running_requests)
        if smaller == placement.max_step_tokens:
            if step_bytes is not None:
                return placement, step_bytes
            raise InvalidArgument(
                f"a step of {smaller} tokens does not fit into the {free / 1e9:.2f} GB that are free on "
                f"{placement.device}; use a smaller max_running_requests, or free the device"
            )
        _log.info("steps of %d tokens would take too much memory, trying %d", 2 * smaller, smaller)
        placement = dataclasses.replace(placement, max_step_tokens=smaller)


def _measured(scout: Scout, max_step_tokens: int) -> int | None:
    """Bytes that a step takes; None if it does not fit at all."""
    try:
        return scout.measure(max_step_tokens)
    except torch.OutOfMemoryError:
        return None


def _plan(rows: Sequence[tuple[int, int]], *, num_decodes: int = 0) -> StepPlan:
    """A step of rows that compute so many tokens after so many others, all on the spare page."""
    counts, starts = (_ints(column) for column in zip(*rows, strict=True))
    nothing = _ints([])
    return StepPlan(
        slots=np.arange(len(rows), dtype=np.int32),
        starts=starts,
        counts=counts,
        samples=np.ones(len(rows), dtype=np.bool_),
        num_decodes=num_decodes,
        token_ids=np.zeros(counts[num_decodes:].sum(), dtype=np.int32),
        page_slots=nothing,
        page_groups=nothing,
        page_columns=nothing,
        page_ids=nothing,
    )


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int32)
