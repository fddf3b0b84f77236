"""What only a GPU can tell of a job and of its plan."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import tokenmill as sgl
from tokenmill import batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("core_process", [False, True])
def test_a_job_tells_how_long_the_device_was_idle(tmp_path: Path, core_process: bool) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"Row {index}:"}) + "\n" for index in range(600)))
    with sgl.Engine(model_path="tiny", device="cuda", core_process=core_process) as engine:
        params = {"max_new_tokens": 400, "ignore_eos": True}
        summary = batch.run(source, tmp_path / "out.jsonl", engine=engine, sampling_params=params)
    assert summary["rows"]["computed"] == 600
    assert 0 <= summary["idle_share"] < 1


def test_a_plan_tells_about_how_long_it_takes(tmp_path: Path) -> None:
    prompts = [f"Question {index}: why is it so? " * (1 + index % 20) for index in range(3000)]
    params = [{"max_new_tokens": 50 + index % 400, "ignore_eos": True} for index in range(3000)]
    with sgl.Engine(model_path="tiny", device="cuda") as engine:
        engine.generate(prompts[:600], params[:600])  # graphs are captured when they are first needed
        planned = engine.plan(prompts, params).seconds
        began = time.perf_counter()
        engine.generate(prompts, params)
        taken = time.perf_counter() - began
    assert planned is not None
    assert taken / 4 < planned < taken * 4
