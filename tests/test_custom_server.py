"""`examples/custom_server.py` behind a true HTTP server, with many clients, some of whom leave."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import tokenmill as sgl

pytestmark = pytest.mark.cpu

EXAMPLE = Path(__file__).parent.parent / "examples" / "custom_server.py"
LONG = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path="tiny") as engine:
        yield engine


@contextlib.contextmanager
def served(llm: sgl.Engine) -> Iterator[str]:
    """The example on a free port, in a thread."""
    spec = importlib.util.spec_from_file_location("custom_server", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    server = uvicorn.Server(uvicorn.Config(example.create_app(llm), log_level="error", ws="none"))
    with socket.create_server(("127.0.0.1", 0), backlog=256) as door:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]})
        thread.start()
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def url(llm: sgl.Engine) -> Iterator[str]:
    with served(llm) as url:
        yield url


def wait_until_idle(llm: sgl.Engine) -> None:
    """Until no request is in the engine: then, and only then, can its cache be emptied."""
    deadline = time.monotonic() + 10
    while not llm.flush_cache():
        assert time.monotonic() < deadline, "requests are still running"
        time.sleep(0.02)


async def read_stream(
    client: httpx.AsyncClient, body: dict[str, Any], *, most: int | None = None
) -> list[Any]:
    """The chunks of a stream; after `most` of them the client leaves."""
    chunks: list[Any] = []
    async with client.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return chunks
            if line:
                chunks.append(json.loads(line.removeprefix("data: ")))
            if most is not None and len(chunks) >= most:
                return chunks
    raise AssertionError("the stream ended without its last event")


def test_whole_answers_and_mistakes(url: str, llm: sgl.Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 4}
    expected = llm.generate("The capital of France is", params)["text"]
    with httpx.Client(base_url=url, trust_env=False) as client:
        one = client.post("/generate", json={"prompt": "The capital of France is", "sampling_params": params})
        assert one.json()["text"] == expected
        two = client.post("/generate", json={"prompt": ["a", "b"], "sampling_params": params})
        assert len(two.json()) == 2
        for path in ("/generate", "/generate_stream"):
            wrong = client.post(path, json={"prompt": "a", "sampling_params": {"temprature": 1}})
            assert wrong.status_code == 400
            assert "Did you mean 'temperature'" in wrong.json()["error"]
            assert client.post(path, json={"prompt": 5}).status_code == 422


def test_64_streams_of_whom_half_leave(url: str, llm: sgl.Engine) -> None:
    """Those who stay get exactly what a plain call gives; of those who leave nothing goes on."""
    prompts = [f"The number {number} is" for number in range(32)]
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    expected = llm.generate(prompts, params)["text"]

    async def main() -> tuple[list[str], list[list[Any]]]:
        limits = httpx.Limits(max_connections=128)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60, trust_env=False) as client:
            stay = [read_stream(client, {"prompt": p, "sampling_params": params}) for p in prompts]
            leave = [read_stream(client, {"prompt": p, "sampling_params": LONG}, most=2) for p in prompts]
            answers = await asyncio.gather(*stay, *leave)
        texts = ["".join(chunk["text"] for chunk in chunks) for chunks in answers[:32]]
        return texts, answers[32:]

    texts, left = asyncio.run(main())
    assert texts == expected
    assert all(chunks[-1]["meta_info"]["finish_reason"] is None for chunks in left)
    wait_until_idle(llm)


def test_a_client_who_does_not_wait_for_a_whole_answer(url: str, llm: sgl.Engine) -> None:
    """Its request would run for minutes."""
    endless = {"prompt": ["a"] * 64, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    with httpx.Client(base_url=url, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json=endless, timeout=0.5)
    start = time.monotonic()
    wait_until_idle(llm)
    assert time.monotonic() - start < 5


def test_a_full_queue_is_told_by_its_status() -> None:
    with (
        sgl.Engine(model_path="tiny", max_running_requests=1, max_queued_requests=1) as small,
        served(small) as url,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        answer = client.post("/generate", json={"prompt": ["a"] * 5, "sampling_params": LONG}, timeout=60)
        assert answer.status_code == 503
        assert "max_queued_requests" in answer.json()["error"]


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 80
