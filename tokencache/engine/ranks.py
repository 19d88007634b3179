"""Finds the data-parallel ranks of an engine, and pins a request to one of them.

vLLM (`--data-parallel-size`) computes with several ranks at one URL. Each has a prefix cache of its own. Without the header
`X-data-parallel-rank` vLLM gives a request to the rank with the fewest requests, so that each rank computes a session's prefix again (0.32,
`v1/engine/core_client.py`). The series at `/metrics` carry the rank as the label `engine`. Only answers count: the engine must accept the
last rank, and refuse the one after it. A router that serves the metrics of one engine and drops the header does not refuse it.
"""

import re
from http import HTTPStatus
from typing import Any

import msgspec

from tokencache.engine.upstream import EngineClient

RANK_HEADER = "X-data-parallel-rank"
_CHAT = "/v1/chat/completions"
_LABEL = re.compile(rb'^vllm:[^\n]*[{,]engine="([0-9]+)"', re.MULTILINE)
_REFUSED = b"data_parallel_rank"
"""vLLM's refusal (400) contains it: `data_parallel_rank 2 is out of range [0, 2).` (0.32, `v1/engine/input_processor.py`)."""


async def find_ranks(engine: EngineClient, model: str, question: bytes) -> int:
    """Return the number of ranks that requests can be pinned to; 1 if there is one, or if it is not certain how many there are.

    Ranks are numbered from 0, also where an engine serves only some of the ranks of a deployment (`--data-parallel-hybrid-lb`).

    Raises:
        EngineError: the engine cannot be reached, or cannot answer now.
    """
    answer = await engine.get("/metrics")
    found = len(set(_LABEL.findall(answer.body))) if answer.status == HTTPStatus.OK else 1
    if found <= 1:
        return 1
    body: dict[str, Any] = {"model": model, "messages": [msgspec.Raw(question)], "max_tokens": 1, "temperature": 0}
    last = await engine.post(_CHAT, body, {RANK_HEADER: str(found - 1)})
    after = await engine.post(_CHAT, body, {RANK_HEADER: str(found)})
    return found if last.status == HTTPStatus.OK and is_refused_rank(after.status, after.body) else 1


def is_refused_rank(status: int, body: bytes) -> bool:
    """Whether an engine refuses a request because it does not have the rank."""
    return status == HTTPStatus.BAD_REQUEST and _REFUSED in body
