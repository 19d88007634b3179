"""Many sessions, each of its own seed, in blocks that share one proxy; counted, and replayed alone."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import random
from functools import partial
from typing import TYPE_CHECKING

from tests.engine.template.more_kinds import ALL_KINDS
from tests.system.adversary.dialects import DIALECTS
from tests.system.adversary.harness import Session
from tests.system.adversary.observed import Tally
from tests.system.adversary.stack import Stack
from tokencache.store.memory import MemoryStore
from tokencache.store.redis.store import RedisStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokencache.core.session import History
    from tokencache.store.base import Store

CALLS, BLOCK = 25, 20
"""Calls of a session, and sessions that share a proxy and what it learns of its template."""


async def block(
    number: int,
    seed: int,
    sessions: Sequence[int],
    templates: Sequence[str],
    history: History,
    *,
    redis: str = "",
    only: int | None = None,
) -> Tally:
    """Run one block of sessions; with `only`, judge nothing but that session (the others are run all the same).

    Turns are stored in memory, or in the Redis at the URL `redis`.
    """
    chooser = random.Random(f"{seed} block {number}")
    template, seed_of_ids = chooser.choice(templates), chooser.getrandbits(32)
    base, parses = chooser.random() < 0.1, history == "follow" or chooser.random() < 0.9
    store: Store = RedisStore(redis, prefix=f"block-{number}") if redis else MemoryStore()
    stack = Stack(template, seed=seed_of_ids, base=base, parses=parses, store=store)
    stack.history = history
    whole = Tally()
    await store.open()
    for session in sessions:
        tally = Tally()
        rng = random.Random(f"{seed} session {session}")
        dialect = rng.choice([*DIALECTS, "chat"])
        one = Session(stack, session, rng, tally, "chat" if stack.engine.base else dialect)  # the other dialects cannot name stop ids
        await one.run(CALLS)
        for name in one.names:
            await stack.forget(name)
        if only is None or only == session:
            whole += tally
        if session == only:
            whole.trace = one.trace
            break
    await store.close()
    return whole


def run_blocks(
    seed: int, numbers: Sequence[int], *, turns: int, templates: Sequence[str], history: History = "supply", redis: str = ""
) -> Tally:
    """Run some blocks, until all of them are done."""
    whole = Tally()
    sessions = -(-turns // CALLS)
    for number in numbers:
        mine = range(number * BLOCK, min((number + 1) * BLOCK, sessions))
        whole += asyncio.run(block(number, seed, mine, templates, history, redis=redis))
    return whole


def run(turns: int, seed: int, *, processes: int = 1, templates: Sequence[str] = (), history: History = "supply", redis: str = "") -> Tally:
    """Run as many sessions as make so many turns."""
    templates = templates or tuple(ALL_KINDS)
    blocks = -(-turns // (CALLS * BLOCK))
    blocks_of = partial(run_blocks, seed, turns=turns, templates=templates, history=history, redis=redis)
    if processes <= 1:
        return blocks_of(range(blocks))
    with multiprocessing.get_context("spawn").Pool(processes, logging.disable, (logging.CRITICAL,)) as pool:
        whole = Tally()
        for tally in pool.map(blocks_of, [[number] for number in range(blocks)], chunksize=1):
            whole += tally
    return whole


def replay(seed: int, session: int, templates: Sequence[str] = (), history: History = "supply", *, redis: str = "") -> Tally:
    """Run one session again, behind those of its block that came before it."""
    number = session // BLOCK
    sessions = range(number * BLOCK, session + 1)
    return asyncio.run(block(number, seed, sessions, templates or tuple(ALL_KINDS), history, redis=redis, only=session))
