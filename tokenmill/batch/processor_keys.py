"""What a logit processor is known by in another run: the code that is called, and the state that it has.

A pickle names functions and classes only, so code that was edited would look the same. Functions of other
places that this code calls are not looked at. Code is what one version of Python makes of it: with another
version, rows are computed anew.
"""

from __future__ import annotations

import inspect
import marshal
import pickle
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tokenmill.logit_processors import LogitProcessor

# Their code may change with their version, and then means the same.
_KNOWN_PACKAGES = {"builtins", "abc", "typing", "tokenmill"}
# What a class has without anybody's writing it, or what says nothing of what it does.
_IDLE_NAMES = {
    "__abstractmethods__",
    "__annotations__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__slotnames__",
    "__static_attributes__",
    "__weakref__",
    "_abc_impl",
}


def identity(processor: LogitProcessor) -> bytes:
    """The same bytes in every process for the same code and state; raises what a pickle raises."""
    if isinstance(processor.source, str):
        return processor.source.encode()
    parts = _Walk().parts(processor.call)
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


class _Walk:
    """Through what a value consists of; functions and classes may lead back to each other."""

    def __init__(self) -> None:
        self._seen: set[FunctionType | type] = set()

    def parts(self, value: Any) -> Iterator[bytes]:
        """Code and state of a value that is called, or that such a one holds."""
        match value:
            case FunctionType():
                yield from self._function(value)
            case type():
                yield from self._class(value)
            case ModuleType():
                yield value.__name__.encode()
            case partial():
                for part in (value.func, *value.args, *sorted(value.keywords.items())):
                    yield from self.parts(part)
            case _ if inspect.ismethod(value):
                yield from self.parts(value.__func__)
                yield from self.parts(value.__self__)
            case _ if callable(value) and type(value).__module__ != "builtins":
                yield from self._class(type(value))
                yield pickle.dumps(value.__getstate__())
            case _:
                yield pickle.dumps(value)

    def _function(self, function: FunctionType) -> Iterator[bytes]:
        yield function.__qualname__.encode()
        if function in self._seen:
            return
        self._seen.add(function)
        yield marshal.dumps(_without_places(function.__code__), 2)  # other forms tell who else holds a part
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        keywords = sorted((function.__kwdefaults__ or {}).items())
        for value in (*(function.__defaults__ or ()), *keywords, *held):
            yield from self.parts(value)

    def _class(self, kind: type) -> Iterator[bytes]:
        for each in kind.__mro__:
            yield f"{each.__module__}.{each.__qualname__}".encode()
            if each in self._seen or each.__module__.partition(".")[0] in _KNOWN_PACKAGES:
                continue
            self._seen.add(each)
            for name, value in sorted(vars(each).items()):
                if name not in _IDLE_NAMES:
                    yield name.encode()
                    yield from self._attribute(value)

    def _attribute(self, value: Any) -> Iterator[bytes]:
        match value:
            case staticmethod() | classmethod():
                yield from self.parts(value.__func__)
            case property():
                for function in (value.fget, value.fset, value.fdel):
                    yield from self.parts(function)
            case _:
                yield from self.parts(value)


def _without_places(code: CodeType) -> CodeType:
    """The same code, wherever it stands."""
    constants = tuple(
        _without_places(each) if isinstance(each, CodeType) else each for each in code.co_consts
    )
    return code.replace(co_filename="", co_firstlineno=1, co_linetable=b"", co_consts=constants)
