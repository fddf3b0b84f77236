"""A server of your own on the engine: whole answers or server-sent events; who leaves costs nothing more.

pip install ".[server]"
python examples/custom_server.py --model-path tiny --port 8000
curl -N localhost:8000/generate_stream --json '{"prompt": "The capital of France is"}'
"""

import argparse
import asyncio
import json
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

import tokenmill as sgl


class Body(BaseModel):
    prompt: str | list[str]
    sampling_params: dict[str, Any] | None = None


def create_app(llm: sgl.Engine) -> FastAPI:
    app = FastAPI()

    @app.exception_handler(sgl.InvalidArgument)
    @app.exception_handler(sgl.RequestFailed)
    async def failed(request: Request, error: Any) -> Response:
        return JSONResponse({"error": str(error)}, status_code=error.status_code)

    @app.post("/generate")
    async def generate(body: Body, request: Request) -> Response:
        answer = asyncio.ensure_future(llm.async_generate(body.prompt, body.sampling_params))
        left = asyncio.ensure_future(has_left(request))
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(answer.result()) if answer.done() else Response(status_code=499)
        finally:
            left.cancel()
            answer.cancel()  # takes the request out of the engine

    @app.post("/generate_stream")
    async def generate_stream(body: Body) -> Response:
        # Mistakes are raised here, before the answer begins.
        chunks = await llm.async_generate(body.prompt, body.sampling_params, stream=True)

        async def events():
            try:
                async for chunk in chunks:
                    yield f"data: {json.dumps(chunk)}\n\n"
                yield "data: [DONE]\n\n"
            finally:
                await chunks.aclose()  # a client who left takes its request out of the engine

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


async def has_left(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", default="tiny")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    with sgl.Engine(model_path=options.model_path, schedule_policy="fcfs") as llm:
        uvicorn.run(create_app(llm), port=options.port)
