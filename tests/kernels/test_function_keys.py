"""Triton's keys of our functions do not depend on the order in which they are asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cpu

# Prints the keys of all functions of all kernels, which are asked for in this order or the other one.
SCRIPT = """
import importlib, json, pkgutil, sys
from triton.runtime.jit import JITCallable
from tokenmill import kernels
from tokenmill.kernels.function_keys import settle_keys

is_backwards, is_settled = json.loads(sys.argv[1])
if is_settled:
    settle_keys()
functions = {}
for found in pkgutil.iter_modules(kernels.__path__):
    if found.name.startswith(("triton_", "hopper_")):
        module = importlib.import_module(f"{kernels.__name__}.{found.name}")
        found_here = [each for each in vars(module).values() if isinstance(each, JITCallable)]
        functions |= {each.__module__ + each.__name__: each for each in found_here}
names = sorted(functions, reverse=is_backwards)
keys = {name: functions[name].cache_key for name in names}
# Constants of one name but of several modules, which Triton takes in the order of their addresses.
values = {name: {} for name in names}
for name in names:
    for (constant, _), (value, _) in functions[name].used_global_vals.items():
        values[name].setdefault(constant, set()).add(str(value))
ambiguous = sorted({constant for used in values.values() for constant in used if len(used[constant]) > 1})
print(json.dumps([keys, ambiguous]))
"""


def keys(*, is_backwards: bool, is_settled: bool) -> tuple[dict[str, str], list[str]]:
    """The keys of all functions, and constants that may make them others in the next process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([is_backwards, is_settled])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, ambiguous = json.loads(done.stdout)
    return found, ambiguous


def test_keys_are_the_same_in_another_order() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    (forwards, ambiguous), (backwards, _) = (
        keys(is_backwards=each, is_settled=True) for each in (False, True)
    )
    assert ambiguous == []
    assert len(forwards) > 100
    assert len(set(forwards.values())) == len(forwards)
    assert forwards == backwards


def test_triton_alone_would_not_do() -> None:
    """If this fails with a newer Triton, `kernels.function_keys` is needed no more."""
    pytest.importorskip("triton", reason="Triton is not installed (extra 'interpreter')")
    (forwards, _), (backwards, _) = (keys(is_backwards=each, is_settled=False) for each in (False, True))
    assert forwards != backwards
