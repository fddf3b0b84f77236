"""What a job tells of the engine that it ran on, and what it watches there while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.batch.figures import Figures

if TYPE_CHECKING:
    from tokenmill.engine import Engine

# Facts of `get_server_info`, in the order in which they are told.
_NAMES = (
    "model_path",
    "architecture",
    "num_parameters",
    "weight_version",
    "device",
    "device_name",
    "dtype",
    "attention_backend",
    "schedule_policy",
    "max_running_requests",
    "max_total_num_tokens",
)


def engine_facts(engine: Engine) -> dict[str, Any]:
    """Model, device, limits and version, as plain JSON."""
    info = engine.get_server_info()
    facts = {name: info[name] for name in _NAMES}
    if facts["schedule_policy"] is None:  # the engine chose it
        facts["schedule_policy"] = "fcfs" if info["enable_priority_scheduling"] else "longest outputs first"
    return {**facts, "tokenmill": info["version"]}


def look_at_device(engine: Engine, figures: Figures) -> None:
    """Tell the figures how long the device was idle; nothing where the engine cannot tell."""
    if (seconds := engine.open_rows().device_seconds()) is not None:
        figures.watched(idle_seconds=seconds["idle"], busy_seconds=seconds["busy"])
