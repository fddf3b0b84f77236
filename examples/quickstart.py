"""Real text from the bundled model in four modes: batch and stream, synchronous and asynchronous."""

from __future__ import annotations

import asyncio

import tokenmill as sgl

prompts = [
    "Hello, my name is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 48}

llm = sgl.Engine(model_path="tiny")

print("=== A batch, all results at once ===")
outputs = llm.generate(prompts, sampling_params)
for prompt, output in zip(prompts, outputs, strict=True):
    print(f"\nPrompt: {prompt}\nGenerated text: {output['text']}")

print("\n=== A stream, text as it is generated ===")
for prompt in prompts:
    print(f"\nPrompt: {prompt}\nGenerated text: ", end="")
    for chunk in llm.generate(prompt, sampling_params, stream=True):
        print(chunk["text"], end="", flush=True)
    print()


async def batch() -> None:
    """Wait for a batch without blocking the event loop."""
    outputs = await llm.async_generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\nPrompt: {prompt}\nGenerated text: {output['text']}")


async def stream() -> None:
    """Read a stream without blocking the event loop."""
    for prompt in prompts:
        print(f"\nPrompt: {prompt}\nGenerated text: ", end="")
        async for chunk in await llm.async_generate(prompt, sampling_params, stream=True):
            print(chunk["text"], end="", flush=True)
        print()


print("\n=== An asynchronous batch ===")
asyncio.run(batch())

print("\n=== An asynchronous stream ===")
asyncio.run(stream())

llm.shutdown()
