"""Recognizes a router: a server that chooses an engine for each session itself.

vllm-router (0.1.17, run) and SGLang's router, from which it comes, list their engines at `GET /list_workers`, as
`{"urls": [...]}`. Later versions of SGLang's list them at `GET /workers`, as `{"workers": [{"url": ...}]}` (read). An engine has neither
route (vLLM 0.32). Every other answer of a router is, or may be, the engine's own. A gateway that forwards everything, such as llm-d's,
cannot be recognized.
"""

import msgspec

from tokencache.engine.upstream import EngineClient
from tokencache.errors import OK


class _Worker(msgspec.Struct):
    url: str


class _Listed(msgspec.Struct):
    urls: list[str] = []
    workers: list[_Worker] = []


async def is_router(engine: EngineClient) -> bool:
    """Whether a server lists the engines that are behind it. One that lists none yet is not recognized.

    Raises:
        EngineError: the server cannot be reached, or cannot answer now.
    """
    for path in ("/list_workers", "/workers"):
        answer = await engine.get(path)
        try:
            found = msgspec.json.decode(answer.body, type=_Listed) if answer.status == OK else _Listed()
        except ValueError:
            continue
        if any("://" in url for url in (*found.urls, *(worker.url for worker in found.workers))):
            return True
    return False
