"""The rules of the house: who imports whom, what is public, how long things are, what an import costs."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tokenmill
from tokenmill.config import EngineConfig

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tokenmill"
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Everybody may import these. `sampling_params` and `arguments` stand on the ground, too.
GROUND = {"messages", "config", "errors", "metrics"}
GROUND |= {"sampling_params", "constraints", "arguments", "sglang_names", "logit_processors", "patterns"}
GROUND |= {"cache_folder", "frozen", "garbage", "imports", "logs", "queue_order", "signals", "switching"}
GROUND |= {"own_processes", "texts", "triton_key"}

# Part -> what it may import besides the ground and itself; `part.module` grants that module only.
GRANTS: dict[str, set[str]] = {
    # The package's own __init__ is its public surface.
    "__init__": {"engine"},
    # Thin shells for users of SGLang's module names.
    "utils": {"__init__", "engine", "frontend"},
    "test": {"__init__"},
    "__main__": {"cli"},
    "cli": {"__init__", "server", "batch", "bench", "engine", "flags"},
    "flags": set(),
    "bench": {"engine"},
    "server": {"engine", "frontend"},
    "batch": {"engine", "frontend", "flags", "hub"},  # hub: which files a journal's answers came from
    "engine": {"frontend"},
    "frontend": {"core.launch", "multimodal", "hub"},
    "multimodal": set(),
    "core": {"grammar", "kvcache", "runner"},
    "grammar": {"hub"},  # the model's tokenizer, from what the user called it
    "kvcache": set(),
    "runner": {
        "kvcache.pool",
        "sampling",
        "speculative",
        "lora",
        "models",
        "layers",
        "attention",
        "parallel",
        "kernels.sharing",  # plain columns: the runner writes them, the kernels read them
        "kernels.rows",  # the runner owns the rows, a kernel gathers them,
        "kernels.operands",  # and these are the columns
        "kernels.mailbox",  # it writes the letters that captured steps take
        "hub",  # it turns `model_path` into a folder before anything is loaded from it
        "kernels.compilation",  # it compiles what the parts below it will launch,
        "kernels.compilers",  # also in processes that it starts before anything else,
        "kernels.linear",  # also products that its own steps do not choose
        "kernels.openmp",  # it decides how many threads compute, and which of them rest
        "kernels.tape",  # it records what the parts below it call, as it captures graphs
        "kernels.launching",  # and says when it does
    },
    "sampling": {"kernels"},
    "speculative": {"sampling", "layers", "kernels", "hub"},
    "lora": {"sampling", "layers", "kernels", "hub"},
    "models": {"layers", "attention", "quantization", "parallel", "hub"},
    "layers": {"attention", "quantization", "parallel", "kernels"},
    "attention": {"kernels"},
    "quantization": {"kernels", "parallel"},
    "kernels": set(),
    "parallel": set(),
    "hub": {"tiny"},
    "tiny": set(),
    "config": set(),
    "errors": set(),
    "messages": set(),
    "metrics": {"errors"},
    "sampling_params": set(),
    "patterns": set(),
    "cache_folder": set(),
    "frozen": set(),
    "garbage": set(),
    "imports": set(),
    "logs": set(),
    "own_processes": set(),
    "queue_order": set(),
    "signals": set(),
    "switching": set(),
    "texts": set(),
    "triton_key": set(),
    "constraints": set(),
    "arguments": set(),
    "sglang_names": set(),
    "logit_processors": set(),
}

# The ground itself is stricter: these are all that a part of the ground may import.
GROUND_GRANTS: dict[str, set[str]] = {
    "config": {"errors"},
    "errors": set(),
    "messages": {"config", "errors", "frozen", "sampling_params"},
    "sampling_params": {"config", "constraints", "errors", "patterns", "texts"},
    "patterns": {"errors"},
    "constraints": {"errors", "texts"},
    "arguments": {"config", "constraints", "errors", "flags", "logs", "sampling_params", "sglang_names"},
    "sglang_names": set(),
    "logit_processors": {"errors", "sampling_params"},
    "hub": {"tiny", "errors"},
    "parallel": {"errors"},
    "kernels": {"cache_folder", "imports", "own_processes", "triton_key"},
    "metrics": {"errors"},
    "tiny": set(),
    "cache_folder": set(),
    "frozen": set(),
    "garbage": set(),
    "imports": {"cache_folder", "garbage", "triton_key"},
    "logs": set(),
    "own_processes": set(),
    "queue_order": {"frozen", "messages"},
    "texts": {"errors"},
    "triton_key": {"cache_folder"},
}

# Below the line: the mill, the model, and the kernels.
TORCH_PARTS = {
    "runner",
    "sampling",
    "speculative",
    "lora",
    "models",
    "layers",
    "attention",
    "quantization",
    "kernels",
    "parallel",
}
TORCH_MODULES = {"kvcache.pool"}
# These import torch or Triton inside a function only: one gives tensors to callers who ask for them, the
# other prepares for an import of torch.
TORCH_WHEN_ASKED = {"frontend.insight", "imports", "triton_key"}

MAX_FILE_LINES = 500
MAX_KERNEL_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100  # a kernel is one launch; in parts it would be several
MAX_INIT_LINES = 40
MAX_CONFIG_FIELDS = 60
# Functions that are plainer in one piece, with the reason.
LONG_FUNCTIONS: dict[str, str] = {}

PUBLIC = {
    "Engine",
    "EngineConfig",
    "ServerArgs",
    "SamplingParams",
    "TokenmillError",
    "InvalidArgument",
    "InvalidRequest",
    "JobStopped",
    "QueueFull",
    "RequestFailed",
    "RequestTimeout",
    "RowError",
    "WrongState",
    "WrongType",
    "UnknownArgument",
    "ModelNotFound",
    "UnsupportedModel",
    "EngineDead",
    "Interrupted",
    "EngineClosed",
    "__version__",
}


# ── reading the package ───────────────────────────────────────────────────────────────────────


@cache
def modules() -> dict[str, Path]:
    """Name below the package (`core.loop`, `core` for its __init__, `__init__`) -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def our_module(dotted: str) -> str | None:
    """The longest module of ours that `tokenmill.a.b` names, or None if it is somebody else's."""
    if dotted == "tokenmill":
        return "__init__"
    if not dotted.startswith("tokenmill."):
        return None
    parts = dotted.removeprefix("tokenmill.").split(".")
    while parts and ".".join(parts) not in modules():
        parts.pop()
    return ".".join(parts) if parts else "__init__"


@cache
def imports_of(name: str) -> frozenset[str]:
    """Every dotted name that the module imports, at its top or inside functions."""
    dotted: set[str] = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            dotted.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import in line {node.lineno}"
            assert node.module is not None
            dotted.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(dotted)


def top_imports_of(name: str) -> set[str]:
    """What the module imports when it is imported."""
    plain = [node for node in tree_of(name).body if isinstance(node, ast.Import)]
    return {alias.name for node in plain for alias in node.names} | {
        node.module or "" for node in tree_of(name).body if isinstance(node, ast.ImportFrom)
    }


def our_imports(name: str) -> set[str]:
    return {ours for dotted in imports_of(name) if (ours := our_module(dotted)) is not None} - {name}


def part_of(name: str) -> str:
    return name.split(".")[0]


def functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name, methods and inner functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
        if isinstance(node, Function | ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from functions(node, prefix)


def is_public(qualified: str) -> bool:
    return all(not part.startswith("_") or part == "__init__" for part in qualified.split("."))


# ── floors ────────────────────────────────────────────────────────────────────────────────────


def test_every_part_stands_in_the_table() -> None:
    assert {part_of(name) for name in modules()} <= set(GRANTS)


@pytest.mark.parametrize("name", modules())
def test_imports_only_what_the_table_grants(name: str) -> None:
    part = part_of(name)
    granted = GROUND_GRANTS[part] if part in GROUND_GRANTS else GRANTS[part] | GROUND
    for other in our_imports(name):
        # The package's own __init__ is run by every import, but only the top floor may use it.
        assert part_of(other) == part or other in granted or part_of(other) in granted, (
            f"tokenmill.{name} imports tokenmill.{other}, which the table does not grant"
        )


def test_the_core_does_not_touch_the_tensors_of_the_cache() -> None:
    for name in modules():
        if part_of(name) in {"core", "frontend", "engine"} or name in {"kvcache", "kvcache.cache"}:
            assert "kvcache.pool" not in our_imports(name), name


def test_only_what_starts_the_core_opens_the_mill() -> None:
    users = {
        name
        for name in modules()
        if part_of(name) == "core" and any(part_of(o) == "runner" for o in our_imports(name))
    }
    assert users <= {"core.launch", "core.process"}
    for name in users:
        opened = {d for d in imports_of(name) if d.startswith("tokenmill.runner")}
        assert opened <= {"tokenmill.runner", "tokenmill.runner.start"}, name


def test_no_import_cycle() -> None:
    """Imports for type checkers and imports inside functions count, too."""
    visiting: list[str] = []
    done: set[str] = set()

    def visit(name: str) -> None:
        if name in done:
            return
        assert name not in visiting, "import cycle: " + " -> ".join([*visiting, name])
        visiting.append(name)
        for other in our_imports(name):
            visit(other)
        visiting.pop()
        done.add(name)

    for name in modules():
        visit(name)


def test_no_torch_above_the_mill() -> None:
    for name in modules():
        if part_of(name) in TORCH_PARTS or name in TORCH_MODULES:
            continue
        names = top_imports_of(name) if name in TORCH_WHEN_ASKED else imports_of(name)
        heavy = {d.split(".")[0] for d in names} & {"torch", "triton"}
        assert not heavy, f"tokenmill.{name} imports {heavy}"


# ── public names ──────────────────────────────────────────────────────────────────────────────


def test_exported_names() -> None:
    assert set(tokenmill.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(tokenmill, name) is not None
    assert set(tokenmill.__all__) <= set(dir(tokenmill))


@pytest.mark.parametrize("name", [name for name in modules() if (PACKAGE / name).is_dir()])
def test_a_folder_exports_few_names(name: str) -> None:
    exported: list[str] = []
    for node in tree_of(name).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            exported = ast.literal_eval(node.value)
    assert len(exported) <= 5, f"tokenmill.{name} exports {len(exported)} names"


@pytest.mark.parametrize("name", modules())
def test_modules_and_public_names_are_documented(name: str) -> None:
    tree = tree_of(name)
    assert ast.get_docstring(tree), f"tokenmill.{name} has no docstring"
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and is_public(node.name):
            assert ast.get_docstring(node), f"tokenmill.{name}.{node.name} has no docstring"


@pytest.mark.parametrize("name", modules())
def test_public_functions_are_typed(name: str) -> None:
    for qualified, node in functions(tree_of(name)):
        if not is_public(qualified) or is_kernel(node):
            continue
        where = f"tokenmill.{name}.{qualified}"
        assert node.returns is not None, f"{where} has no return type"
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        variadic = [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        for argument in arguments + variadic:
            assert argument.annotation is not None or argument.arg in {"self", "cls"}, (
                f"{where}: argument {argument.arg} has no type"
            )


def is_kernel(node: Function) -> bool:
    """The languages of Triton have their own types."""
    return any(ast.unparse(decorator).startswith(("triton.", "gluon.")) for decorator in node.decorator_list)


# ── sizes and habits ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", modules())
def test_files_stay_short(name: str) -> None:
    lines = len(modules()[name].read_text(encoding="utf-8").splitlines())
    if modules()[name].name == "__init__.py":
        limit = MAX_INIT_LINES if name != "__init__" else 2 * MAX_INIT_LINES
    else:
        limit = MAX_KERNEL_FILE_LINES if part_of(name) == "kernels" else MAX_FILE_LINES
    assert lines <= limit, f"tokenmill.{name} has {lines} lines, the limit is {limit}"


def test_functions_stay_short() -> None:
    long = {}
    for name in modules():
        for qualified, node in functions(tree_of(name)):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > (MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES):
                long[f"{name}.{qualified}"] = lines
    assert set(long) == set(LONG_FUNCTIONS), long


def test_no_drawer_for_everything() -> None:
    drawers = {p for p in modules().values() if p.stem in {"utils", "common", "misc", "helpers"}}
    # The one exception is promised to users of `sglang.utils`.
    assert drawers <= {PACKAGE / "utils.py"}
    assert not [name for name in modules() if re.search(r"(manager|helper)", name)]


def test_config_stays_small() -> None:
    fields = dataclasses.fields(EngineConfig)
    assert len(fields) <= MAX_CONFIG_FIELDS
    for field in fields:
        assert field.metadata["help"], field.name


def test_every_part_is_on_the_map() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for part in {part_of(name) for name in modules()}:
        name = f"{part}/" if (PACKAGE / part).is_dir() else f"{part}.py"
        assert re.search(rf"(?<![\w/]){re.escape(name)}", page), f"{name} is not in docs/architecture.md"


def test_no_unfinished_marks_and_no_paths_of_a_machine() -> None:
    # Put together here so that this file does not find itself.
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]) + r")\b")
    paths = re.compile(r"(?<![\w./~-])/(?:" + "|".join(["work", "root", "home", "Users", "tmp"]) + r")/\w")
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
            assert not marks.search(line), where
            assert not paths.search(line), where


def text_files() -> Iterator[Path]:
    folders = ["tokenmill", "tests", "docs", "examples", "benchmarks", "scripts", "tools", ".ci"]
    for path in [*ROOT.iterdir(), *(p for folder in folders for p in (ROOT / folder).rglob("*"))]:
        is_text = path.suffix in {".py", ".md", ".toml", ".sh", ""} or path.parent.name == "scripts"
        # In a worktree `.git` is a file, which says where the repository is.
        is_ours = path.name not in ("LICENSE", ".git") and "__pycache__" not in path.parts
        if path.is_file() and is_text and is_ours:
            yield path


# ── what an import costs and changes ──────────────────────────────────────────────────────────


def run_python(code: str) -> str:
    """Standard output of the code in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    loaded = run_python(
        """
        import sys, tokenmill, tokenmill.cli, tokenmill.utils
        heavy = {"torch", "triton", "transformers", "tokenizers", "huggingface_hub", "tqdm", "pydantic"}
        print(*sorted(heavy & set(sys.modules)))
        """
    )
    assert loaded.split() == []


def test_import_is_quick() -> None:
    """The best of several, because other programs of the machine only ever add time."""

    def seconds(code: str) -> float:
        start = time.perf_counter()
        run_python(code)
        return time.perf_counter() - start

    run_python("import tokenmill")  # writes the byte code
    bare = min(seconds("pass") for _ in range(5))
    ours = min(seconds("import tokenmill") for _ in range(5))
    assert ours - bare < 0.3


def test_import_changes_nothing_global() -> None:
    changed = run_python(
        """
        import asyncio, atexit, logging, multiprocessing, os, resource, signal, sys, threading

        def state():
            return {
                "environment": dict(os.environ),
                "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
                "start method": multiprocessing.get_start_method(allow_none=True),
                "log handlers": list(logging.getLogger().handlers),
                "log level": logging.getLogger().level,
                "our log handlers": list(logging.getLogger("tokenmill").handlers),
                "threads": threading.active_count(),
                "exit hooks": atexit._ncallbacks(),
                "hooks": (sys.excepthook, threading.excepthook),
                "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
                "loop policy": asyncio.events._event_loop_policy,
                "folder": os.getcwd(),
            }

        import numpy  # has its own exit hooks, if any
        before = state()
        import tokenmill, tokenmill.cli, tokenmill.utils, tokenmill.test.doc_patch
        tokenmill.Engine, tokenmill.SamplingParams
        after = state()
        print(*(name for name in before if before[name] != after[name]), sep=", ")
        """
    )
    assert changed.strip() == ""


def test_version_is_that_of_the_project_file() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert tokenmill.__version__ == declared.group(1)
