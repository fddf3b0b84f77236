"""From a name to a folder: folders, the bundled model, a cache of the hub, and honest refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmill import hub
from tokenmill.errors import InvalidArgument, ModelNotFound

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache as the hub's client leaves it, with one repository at one commit, and the branch main."""
    repository = tmp_path / "cache" / "models--acme--rocket-1b"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path / "cache"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.resolve(str(tmp_path)) == tmp_path
    assert hub.resolve(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert hub.resolve(f"~/{tmp_path.name}") == tmp_path


def test_the_bundled_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    bundled = tmp_path / "inside"
    monkeypatch.setitem(hub.BUNDLED, "tiny", bundled)
    with pytest.raises(ModelNotFound, match="installation is incomplete"):
        hub.resolve("tiny")
    bundled.mkdir()
    assert hub.resolve("tiny") == bundled
    (tmp_path / "tiny").mkdir()  # the user's own folder comes first
    assert hub.resolve("tiny") == Path("tiny")


def test_the_bundled_model_is_in_the_package() -> None:
    assert hub.BUNDLED["tiny"] == Path(hub.__file__).parent / "tiny"


@pytest.mark.usefixtures("offline")
def test_a_cached_repository_needs_no_network(cache: Path) -> None:
    snapshot = cache / "models--acme--rocket-1b" / "snapshots" / COMMIT
    for revision in (None, "main", COMMIT):
        assert hub.resolve("acme/rocket-1b", revision=revision, download_dir=str(cache)) == snapshot


@pytest.mark.usefixtures("offline")
def test_what_is_not_cached_says_so(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"acme/rocket-2b.*HF_HUB_OFFLINE.*download_dir"):
        hub.resolve("acme/rocket-2b", download_dir=str(cache))
    with pytest.raises(ModelNotFound, match=r"revision 'v2'.*HF_HUB_OFFLINE"):
        hub.resolve("acme/rocket-1b", revision="v2", download_dir=str(cache))


def test_the_cache_works_in_a_fresh_process_with_the_variable_set(cache: Path) -> None:
    code = (
        "import sys; from tokenmill.hub import resolve\n"
        "print(resolve('acme/rocket-1b', download_dir=sys.argv[1]))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(cache)],
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(hub.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(cache / "models--acme--rocket-1b" / "snapshots" / COMMIT), "False"]


def test_a_broken_network_falls_back_on_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    real = huggingface_hub.snapshot_download

    def without_network(*arguments: Any, local_files_only: bool, **named: Any) -> Any:
        if not local_files_only:
            raise RuntimeError("no route to host")
        return real(*arguments, local_files_only=True, **named)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", without_network)
    snapshot = cache / "models--acme--rocket-1b" / "snapshots" / COMMIT
    assert hub.resolve("acme/rocket-1b", download_dir=str(cache)) == snapshot
    with pytest.raises(ModelNotFound, match=r"acme/rocket-2b.*RuntimeError: no route to host"):
        hub.resolve("acme/rocket-2b", download_dir=str(cache))


def test_what_the_hub_refuses_is_not_looked_up_in_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import RevisionNotFoundError

    def refuse(*arguments: Any, local_files_only: bool, **named: Any) -> Any:
        assert not local_files_only
        raise RevisionNotFoundError.__new__(RevisionNotFoundError)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=r"revision 'v9': the repository has no such revision"):
        hub.resolve("acme/rocket-1b", revision="v9", download_dir=str(cache))


@pytest.mark.usefixtures("offline")
def test_a_slip_of_the_pen_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="Did you mean 'tiny'"):
        hub.resolve("tinny", download_dir=str(tmp_path))
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ModelNotFound, match=r"no such folder\. Did you mean 'my-model'"):
        hub.resolve(str(tmp_path / "my-modle"))


@pytest.mark.parametrize("name", ["./absent", "../absent/model", "a/b/c", "absent\\model", "~/absent-model"])
def test_a_path_is_not_sent_to_the_hub(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="no such folder"):
        hub.resolve(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"is a file.*folder"):
        hub.resolve(str(tmp_path / "model.safetensors"))


def test_names_that_no_repository_has() -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        hub.resolve("")
    with pytest.raises(ModelNotFound, match="not a valid repository id"):
        hub.resolve("two words")


@pytest.mark.usefixtures("offline")
def test_only_files_that_are_used_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The patterns that go to the hub, applied to the files of real repositories."""
    import huggingface_hub
    from huggingface_hub.utils._paths import filter_repo_objects

    asked = {}

    def fake_download(repo_id: str, **arguments: object) -> str:
        asked.update(arguments)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    assert hub.resolve("acme/rocket-1b", revision="v1", download_dir="there") == tmp_path
    assert (asked["revision"], asked["cache_dir"]) == ("v1", "there")
    wanted = {
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
    }
    others = {
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.onnx",
        "rocket.gguf",
        "picture.png",
    }
    kept = filter_repo_objects(
        sorted(wanted | others),
        allow_patterns=asked["allow_patterns"],  # type: ignore[arg-type]
        ignore_patterns=asked["ignore_patterns"],  # type: ignore[arg-type]
    )
    assert set(kept) == wanted


def test_json_of_a_model_is_an_object_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert hub.read_json(path) is None
    path.write_text('{"a": "é"}', encoding="utf-8")
    assert hub.read_json(path) == {"a": "é"}
    path.write_text("\n")
    with pytest.raises(
        InvalidArgument, match=r"config\.json is not valid JSON \(it is empty\); .*fetch it again"
    ):
        hub.read_json(path)
    path.unlink()
    path.symlink_to("nowhere")  # as a cache of the hub that somebody tidied up
    with pytest.raises(InvalidArgument, match=r"config\.json cannot be read \(No such file.*dead link"):
        hub.read_json(path)
