"""Kernels are launched by the function that was built for their arguments, whoever loads others meanwhile."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

build = pytest.importorskip("triton.runtime.build", reason="Triton is not installed (extra 'interpreter')")

from tokenmill.kernels.launchers import keep_apart  # noqa: E402  # needs Triton

HEADER = Path(sysconfig.get_paths()["include"]) / "Python.h"
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        not HEADER.exists() or not any(map(shutil.which, ("cc", "gcc", "clang"))),
        reason="no C compiler, or nothing to compile modules of Python with",
    ),
]

# As Triton's: a module of this name that keeps its state where Python looks for it when it comes again.
NAME = "__triton_launcher"
SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *arguments) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


def load(number: int) -> Any:
    """A module whose `launch` returns the number."""
    return build.compile_module_from_src(SOURCE % number, NAME)


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of this test alone, and threads that take turns as they do while graphs are captured."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    keep_apart()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_launcher_that_is_loaded_again_changes_no_other() -> None:
    first, second = load(1), load(2)
    again = load(1)
    assert [each.launch() for each in (first, second, again)] == [1, 2, 1]


def test_threads_that_load_at_the_same_time_get_their_own_launchers() -> None:
    numbers = range(4)
    for number in numbers:
        load(number)

    def launched(number: int) -> set[int]:
        return {load(number).launch() for _ in range(500)}

    with ThreadPoolExecutor(len(numbers)) as threads:
        assert list(threads.map(launched, numbers)) == [{number} for number in numbers]


def test_what_is_kept_apart_once_stays_as_it_is() -> None:
    before = build._load_module_from_path
    keep_apart()
    assert build._load_module_from_path is before
