"""From what a user calls a model (a folder, "tiny", or a hub id) to the folder that holds its files.

Knows nothing of what the files mean, and imports no torch.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenmill.errors import InvalidArgument, ModelNotFound, did_you_mean

BUNDLED = {"tiny": Path(__file__).parent / "tiny"}
# Configuration, tokenizer and chat template files, and weights in the one format that is loaded.
_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "tokenizer*"]
# The same weights once more, in layouts of other programs.
_OTHER_LAYOUTS = ["consolidated*", "original/*", "onnx/*", "openvino/*", "*.gguf"]
# What to do about a file that is broken.
FETCH_AGAIN = "the download may be incomplete, or the file a Git LFS pointer or a dead link: fetch it again"


def resolve(
    model_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    argument: str = "model_path",
) -> Path:
    """The folder of a model: an existing folder, a bundled model by name, or a hub repository.

    A folder of that name wins over the bundled model and the hub. Hub files land in `download_dir`
    (default: the hub's own cache) and are not fetched again; without a network, or with HF_HUB_OFFLINE=1,
    the cached ones are used. `revision` (a branch, tag or commit) concerns hub repositories only; `argument`
    is what messages call the path. Raises `ModelNotFound` saying what was tried.
    """
    name = os.fspath(model_path)
    if not name:
        raise InvalidArgument(f"{argument} is empty; give a folder, a hub id, or 'tiny'")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelNotFound(f"{argument}={name!r} is a file; give the folder that holds config.json")
    if name in BUNDLED:
        return _bundled(name)
    if _looks_like_a_path(name):
        raise ModelNotFound(f"{argument}={name!r}: there is no such folder.{_neighbour(path)}")
    return _download(name, revision=revision, download_dir=download_dir, argument=argument)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file of a model; None if nothing has that name.

    Raises `InvalidArgument` where it cannot be read, or is anything else.
    """
    if not os.path.lexists(path):
        return None
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = error if text.strip() else "it is empty"
        raise InvalidArgument(f"{path} is not valid JSON ({problem}); {FETCH_AGAIN}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} must hold a JSON object, not {type(value).__name__}; {FETCH_AGAIN}")
    return value


def read_text(path: Path) -> str:
    """The text of a file of a model; raises `InvalidArgument` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error}"
        raise InvalidArgument(f"{path} cannot be read ({problem}); {FETCH_AGAIN}") from error


def _bundled(name: str) -> Path:
    if not BUNDLED[name].is_dir():
        raise ModelNotFound(
            f"the bundled model {name!r} is not at {BUNDLED[name]}; the installation is incomplete"
        )
    return BUNDLED[name]


def _looks_like_a_path(name: str) -> bool:
    """A hub id is `name` or `owner/name`; whatever else has a separator or a leading dot is a path."""
    return name.startswith((".", "~", "/", os.sep)) or name.count("/") > 1 or "\\" in name


def _neighbour(path: Path) -> str:
    """A suggestion from the folders beside a path that does not exist."""
    parent = path.absolute().parent
    if not parent.is_dir():
        return f" Nor is there a folder {str(parent)!r}."
    return did_you_mean(path.name, [entry.name for entry in parent.iterdir() if entry.is_dir()])


def _download(name: str, *, revision: str | None, download_dir: str | None, argument: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fetch(*, local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=_PATTERNS,
                ignore_patterns=_OTHER_LAYOUTS,
                local_files_only=local_files_only,
            )
        )

    try:
        return fetch(local_files_only=False)
    except Exception as error:  # each version of the hub's client has its own for a missing network
        if not _is_final(error):
            with suppress(LocalEntryNotFoundError):
                return fetch(local_files_only=True)
        where = f" at revision {revision!r}" if revision is not None else ""
        raise ModelNotFound(
            f"{argument}={name!r} is no folder here, no bundled model ({', '.join(BUNDLED)}), and could not "
            f"be had from the hub{where}: {_reason(error)}{did_you_mean(name, BUNDLED)}"
        ) from error


def _is_final(error: Exception) -> bool:
    """Whether the hub was asked and said no, so that looking into the cache is no answer."""
    from huggingface_hub import errors

    return isinstance(
        error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError | errors.HFValidationError
    )


def _reason(error: Exception) -> str:
    """What went wrong on the hub, and what to do about it."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the repository is gated; accept its terms on its page and log in with `hf auth login`."
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or it is private and you are not logged in."
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository has no such revision."
    if isinstance(error, errors.HFValidationError):
        return "this is not a valid repository id (owner/name)."
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return (
            "it is not in the local cache, and the hub is off (HF_HUB_OFFLINE) or cannot be reached. "
            "Download it where there is a network, then give its folder or its cache as download_dir."
        )
    return f"{type(error).__name__}: {error}"
