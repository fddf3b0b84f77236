"""Run `kernels/hopper_*.py` on the CPU: a thread for each group of warps, NumPy for what they compute.

Gluon has no interpreter. This one knows only what those files use, and what matters there: which numbers lie
where in shared memory, and who waits for whom. Layouts in registers, fences and speed are not its business.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

PATIENCE_SECONDS = 20.0  # a barrier that does not open by then is a deadlock


class Tensor(np.ndarray):
    """An array of any rank whose scalars stay arrays, with the few methods that kernels call."""

    type = SimpleNamespace(layout=None)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Tensor:
        return np.asarray(array).view(Tensor)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        """Numbers of two bytes have four here, whatever type they are taken for."""
        return self if bitcast else self.astype(dtype)

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return self.transpose(order)

    def split(self) -> tuple[Tensor, Tensor]:
        return self[..., 0], self[..., 1]


def tensor(value: Any) -> Tensor:
    return np.asarray(value).view(Tensor)


class Pointer:
    """Places in a torch tensor's storage."""

    def __init__(self, storage: np.ndarray, places: Any) -> None:
        self.storage, self.places = storage, places
        self.dtype = SimpleNamespace(element_ty=storage.dtype)

    @classmethod
    def to(cls, x: torch.Tensor) -> Pointer:
        whole = x.new_empty(0).set_(x.untyped_storage())
        return cls(whole.numpy(), tensor(x.storage_offset()))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.storage, self.places + offset)


class Shared:
    """A tile in shared memory: `panels` holds it in columns of 64 numbers, one after the other."""

    layout = None

    def __init__(self, panels: np.ndarray, shape: tuple[int, ...]) -> None:
        self.panels, self.shape, self.dtype = panels, shape, panels.dtype

    def index(self, place: Any) -> Shared:
        count = len(self.panels) // self.shape[0]
        return Shared(self.panels[int(place) * count : (int(place) + 1) * count], self.shape[1:])

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        return Shared(self.panels.reshape(-1, shape[-2], 64), tuple(shape))

    def load(self, layout: Any = None) -> Tensor:
        return tensor(np.concatenate(list(self.panels), axis=1))

    def store(self, value: np.ndarray) -> None:
        value = value.reshape(self.panels.shape[1], -1)
        for number, panel in enumerate(self.panels):
            panel[:] = value[:, 64 * number : 64 * number + 64]

    def permute(self, order: tuple[int, ...]) -> SimpleNamespace:
        return SimpleNamespace(load=lambda: self.load().T, store=lambda value: self.store(value.T))


class Cells(list[np.ndarray]):
    """Single numbers in shared memory, slowly read and written, and how many are yet to read each: all groups
    of warps, but the one that tells the others."""

    lock = threading.Lock()

    def index(self, place: Any) -> SimpleNamespace:  # type: ignore[override]
        cell = self[int(place)]

        def load(layout: Any) -> Tensor:
            time.sleep(0.003)
            with self.lock:
                assert cell[1] > 0, "read before it was told, or twice"
                cell[1] -= 1
                return tensor(cell[:1].copy())

        def store(value: np.ndarray) -> None:
            time.sleep(0.001)
            with self.lock:
                assert cell[1] == 0, "told before all have taken it in"
                cell[:] = value[0], _program.groups - 1

        return SimpleNamespace(load=load, store=store)


class Barrier:
    """Opens when `count` have arrived and all bytes that were announced are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.opened = 0

    def change(self, arrivals: int, announced: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += announced
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == self.bytes == 0:
                self.opened += 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, phase: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.opened % 2 != int(phase), PATIENCE_SECONDS):
                raise TimeoutError("a barrier stays shut")


class Barriers(list[Barrier]):
    def index(self, place: Any) -> Barrier:  # type: ignore[override]
        return self[int(place)]


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


class Descriptor:
    def __init__(self, base: torch.Tensor, shape: list[int], strides: list[int], block: list[int], _: Any):
        pointer = Pointer.to(base)
        last = int(pointer.places) + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        assert last < len(pointer.storage), "past the end of the memory"
        self.source = np.lib.stride_tricks.as_strided(
            pointer.storage[int(pointer.places) :], shape, [4 * stride for stride in strides]
        )
        self.base, self.block_shape, self.layout, self.padding = base, block, None, "zero"
        self.dtype = pointer.storage.dtype
        self.block_type = SimpleNamespace(nbytes=2 * int(np.prod(block)))


def _copy(tiles: Descriptor, start: list[Any], barrier: Barrier, place: Shared) -> None:
    """A box of the source; zero past its ends."""
    box = np.zeros(tiles.block_shape, tiles.dtype)
    begins = [int(at) for at in start]
    assert all(begin >= 0 for begin in begins)
    ends = [at + size for at, size in zip(begins, tiles.block_shape, strict=True)]
    found = tiles.source[tuple(map(slice, begins, ends))]
    box[tuple(slice(0, size) for size in found.shape)] = found
    place.store(box)
    barrier.change(0, -tiles.block_type.nbytes)


_under_way = threading.local()


def _copy_back(tiles: Descriptor, start: list[Any], place: Shared) -> None:
    """The part of a box that lies within the target; as late as can be, when somebody waits for it."""
    begins = [int(at) for at in start]
    ends = [at + size for at, size in zip(begins, tiles.block_shape, strict=True)]
    target = tiles.source[tuple(map(slice, begins, ends))]

    def copy() -> None:
        target[:] = place.load()[tuple(slice(0, size) for size in target.shape)]

    vars(_under_way).setdefault("copies", []).append(copy)


def _store_wait(pendings: int) -> None:
    """Return when no more copies than these are under way."""
    copies = vars(_under_way).get("copies", [])
    while len(copies) > pendings:
        copies.pop(0)()


def _product(a: Any, b: Any, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Tensor:
    """As late as can be, when somebody waits for it."""
    made = tensor(np.full(np.shape(acc), np.nan, np.float32))

    def multiply() -> None:
        left = a if isinstance(a, np.ndarray) else a.load()
        with np.errstate(all="ignore"):
            product = np.asarray(left, np.float32) @ np.asarray(b.load(), np.float32)
        made[...] = acc + product if use_acc else product

    vars(_under_way).setdefault("products", []).append(multiply)
    if not is_async:
        _product_wait(0, [made])
    return made


def _product_wait(pendings: int, deps: list[Tensor]) -> Any:
    """Return when no more products than these are under way."""
    products = vars(_under_way).get("products", [])
    while len(products) > pendings:
        products.pop(0)()
    return deps[0] if len(deps) == 1 else tuple(deps)


def _load(source: Pointer, mask: Any = True, other: Any = 0) -> Tensor:
    places = np.where(mask, source.places, 0)
    return tensor(np.where(mask, source.storage[places], other))


def _store(target: Pointer, value: Any, mask: Any = True) -> None:
    value = np.asarray(value)
    mask = np.broadcast_to(mask, value.shape)
    target.storage[np.asarray(target.places)[mask]] = value[mask]


def _atomic_add(target: Pointer, value: Any, sem: str) -> Tensor:
    """No two programs run at the same time here."""
    before = tensor(target.storage[target.places].copy())
    target.storage[target.places] += value
    return before


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout == "barrier":
        return Barriers(Barrier() for _ in range(shape[0]))
    *tiles, tokens, width = shape
    if width == 1:
        return Cells(np.zeros(2, dtype) for _ in range(tokens))
    return Shared(np.full((math.prod(tiles) * (width // 64), tokens, 64), np.nan, dtype), tuple(shape))


_program = threading.local()


def _warp_specialize(parts: list[tuple[Any, tuple[Any, ...]]], _: list[int], __: list[int]) -> None:
    place, programs = _program.place, _program.count
    problems: list[BaseException] = []

    def run(function: Any, arguments: tuple[Any, ...]) -> None:
        _program.place, _program.count, _program.groups = place, programs, len(parts)
        try:
            with np.errstate(all="ignore"):
                function(*arguments)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


class Kernel:
    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            *arguments: Any, num_warps: int, maxnreg: int = 0, launch_pdl: bool = False, **constants: Any
        ) -> None:
            values = [
                Pointer.to(x) if isinstance(x, torch.Tensor) else tensor(x) if isinstance(x, int) else x
                for x in arguments
            ]
            for place in np.ndindex(grid):
                _program.place, _program.count = place, grid
                self.function(*values, **constants)

        return launch


def _jit(function: Any = None, **_: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _use(module: ModuleType, source: Path) -> None:
    """What the module took from another file of kernels, for the CPU as well."""
    original, replaced = import_module(f"tokenmill.kernels.{source.stem}"), vars(load_module(source))
    for name, value in vars(original).items():
        if not name.startswith("__") and module.__dict__.get(name) is value:
            module.__dict__[name] = replaced[name]


def _constexpr(value: Any) -> Any:
    return type("Constant", (type(value),), {"value": value})(value)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def load_module(path: Path) -> ModuleType:
    """The module at `path`, with this file in Gluon's place."""
    names = SimpleNamespace(
        constexpr=_constexpr,
        bfloat16=object(),  # nothing is of this type here: what is written for it in assembly, a GPU must run
        float32=np.float32,
        int16=np.int16,
        int32=np.int32,
        int64=np.int64,
        arange=lambda start, stop, layout=None: tensor(np.arange(start, stop)),
        zeros=lambda shape, dtype, layout=None: tensor(np.zeros(shape, dtype)),
        full=lambda shape, value, dtype, layout=None: tensor(np.full(shape, value, dtype)),
        where=lambda condition, a, b: tensor(np.where(condition, a, b)),
        minimum=lambda a, b: tensor(np.minimum(a, b)),
        maximum=lambda a, b: tensor(np.fmax(a, b)),
        max=lambda x, axis: tensor(np.fmax.reduce(x, axis)),
        sum=lambda x, axis: tensor(np.sum(x, axis)),
        exp2=lambda x: tensor(np.exp2(x)),
        log2=lambda x: tensor(np.log2(x)),
        exp=lambda x: tensor(np.exp(x)),
        reshape=lambda x, shape: tensor(np.reshape(x, shape)),
        rsqrt=lambda x: tensor(1 / np.sqrt(x)),
        load=_load,
        store=_store,
        atomic_add=_atomic_add,
        static_range=range,
        convert_layout=lambda x, layout: x,
        thread_barrier=_nothing,
        program_id=lambda axis: tensor(_program.place[axis]),
        num_programs=lambda axis: tensor(_program.count[axis]),
        num_warps=_nothing,
        warp_specialize=_warp_specialize,
        allocate_shared_memory=_allocate,
        **dict.fromkeys(
            (
                "BlockedLayout",
                "SliceLayout",
                "DotOperandLayout",
                "NVMMADistributedLayout",
                "NVMMASharedLayout",
                "SwizzledSharedLayout",
            ),
            _nothing,
        ),
    )
    source = path.read_text()
    kept, _, rest = source.partition("from triton.experimental import gluon\n")
    rest = rest[re.search("^(from tokenmill|[A-Z@])", rest, re.MULTILINE).start() :]  # Gluon's own names
    module = ModuleType(f"{path.stem}_on_cpu")
    sys.modules[module.__name__] = module
    module.__dict__.update(
        gluon=SimpleNamespace(jit=_jit),
        gl=names,
        fence_async_shared=_nothing,
        mbarrier=SimpleNamespace(
            init=_init,
            expect=lambda barrier, size: barrier.change(1, int(size)),
            arrive=lambda barrier, pred=True: barrier.change(1, 0) if pred else None,
            wait=lambda barrier, phase: barrier.wait(phase),
            MBarrierLayout=lambda: "barrier",
        ),
        tma=SimpleNamespace(
            async_copy_global_to_shared=_copy, async_copy_shared_to_global=_copy_back, store_wait=_store_wait
        ),
        warpgroup_mma=_product,
        warpgroup_mma_wait=_product_wait,
        TensorDescriptor=Descriptor,
    )
    exec(compile(kept + rest, str(path), "exec"), module.__dict__)
    for other in ("hopper_linear", "hopper_pages", "hopper_prefill", "hopper_work"):
        if f"from tokenmill.kernels.{other} import" in rest:
            _use(module, path.with_name(f"{other}.py"))
    # Programs run one after the other here.
    module.__dict__.update(let_next_begin=_nothing, wait_for_inputs=_nothing)
    return module
