"""What of a result is kept: all that would be the same whenever and beside whatever the row is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys of `meta_info` that tell of one run: its times, its neighbours, and the name of the request.
_OF_ONE_RUN = frozenset(
    {
        "id",
        "cached_tokens",
        "cached_tokens_details",
        "num_retractions",
        "response_sent_to_client_ts",
        "dp_rank",
        "e2e_latency",
        "request_received_ts",
        "api_server_dispatch_finish_ts",
        "queue_time",
        "forward_entry_time",
        "prefill_finished_time",
        "first_token_latency",
        "request_finished_ts",
        "decode_throughput",
    }
)


def lasting(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result without what tells of one run only; the rest is not copied."""
    facts = {name: value for name, value in result["meta_info"].items() if name not in _OF_ONE_RUN}
    return {**result, "meta_info": facts}
