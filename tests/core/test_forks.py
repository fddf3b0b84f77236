"""An engine in a forked process says that it is not its own, and leaves the one of its parent alone."""

from __future__ import annotations

import os
import subprocess
import sys
from textwrap import dedent

import pytest

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes"),
]
SCRIPT = """
    import os, sys
    import tokenmill as sgl

    if __name__ == "__main__":
        params = {"temperature": 0, "max_new_tokens": 3}
        engine = sgl.Engine(model_path="tiny", core_process=sys.argv[1] == "process")
        long = {**params, "max_new_tokens": 200, "ignore_eos": True}
        stream = engine.generate("Once", long, stream=True)
        next(stream)
        short = {**params, "max_new_tokens": 1}
        rows = engine.iter([{"prompt": "Hi", "sampling_params": short}, {"prompt": "Once"}], long)
        next(rows)  # both are submitted
        child = os.fork()
        if not child:
            calls = [lambda: engine.generate("Hi", params), engine.flush_cache, engine.get_server_info]
            for call in [*calls, lambda: list(stream), lambda: next(rows)]:
                try:
                    call()
                except sgl.WrongState as error:
                    assert f"process {os.getppid()}" in str(error), error
                else:
                    raise SystemExit("it was not refused")
            stream.close()
            engine.shutdown()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert sum(1 for _ in stream) > 50
        assert len(next(rows)["output_ids"]) == 200
        assert len(engine.generate("Hi", params)["output_ids"]) == 3
        engine.shutdown()
        print("all is well")
"""


@pytest.mark.parametrize("core", ["thread", "process"])
def test_an_engine_in_a_forked_process(core: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", dedent(SCRIPT), core], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "all is well\n", done.stderr
    assert "another takes its place" not in done.stderr
