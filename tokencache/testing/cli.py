"""The simulated engine as a process of its own: `python -m tokencache.testing.engine --port 8000`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from tokencache.testing.engine import SimulatedEngine
from tokencache.testing.faults import FaultOrders
from tokencache.testing.generation import LogprobsMode

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted; prints the base URL once it answers, on a line of its own."""
    parser = argparse.ArgumentParser(prog="python -m tokencache.testing.engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument("--episodes", type=Path, help="JSON file: name to list of replies")
    parser.add_argument("--model", default="sim", help="name of the model that is served")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drift", type=float, default=0.3, help="probability of each token to be said in two pieces")
    parser.add_argument("--max-model-len", type=int, default=131072, help="tokens")
    parser.add_argument("--token-delay", type=float, default=0.0, help="seconds")
    parser.add_argument("--chunk-tokens", type=int, default=1, help="tokens in each chunk of a stream")
    parser.add_argument("--ignore-ids", action="store_true", help="ignore supplied prompt ids, as vLLM before 0.27 does")
    parser.add_argument("--logprobs-mode", default="raw_logprobs", choices=get_args(LogprobsMode), help="what log probabilities are")
    parser.add_argument("--journal", type=Path, help="file in which the books are kept, each token before it goes out")
    parser.add_argument("--control", action="store_true", help="take orders for faults: POST /control/faults")
    options = parser.parse_args(arguments)
    engine = SimulatedEngine(
        episodes=json.loads(options.episodes.read_text(encoding="utf-8")) if options.episodes else None,
        model=options.model,
        seed=options.seed,
        drift=options.drift,
        max_model_len=options.max_model_len,
        token_delay=options.token_delay,
        chunk_tokens=options.chunk_tokens,
        honours_ids=not options.ignore_ids,
        logprobs_mode=options.logprobs_mode,
        journal=options.journal,
        orders=FaultOrders() if options.control else None,
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(engine, options.host, options.port))


async def _serve(engine: SimulatedEngine, host: str, port: int) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with engine.serve(host, port) as url:
        print(url, flush=True)  # noqa: T201 - what the caller waits for
        await stopped.wait()
