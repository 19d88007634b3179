"""Many sessions, each of its own seed, in blocks that share one proxy; counted, and replayed alone."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import random
from typing import TYPE_CHECKING

from tests.engine.template.more_kinds import ALL_KINDS
from tests.system.adversary.dialects import DIALECTS
from tests.system.adversary.harness import Session
from tests.system.adversary.observed import Tally
from tests.system.adversary.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokencache.core.session import History

CALLS, BLOCK = 25, 20
"""Calls of a session, and sessions that share a proxy and what it learns of its template."""


async def block(
    number: int, seed: int, sessions: Sequence[int], templates: Sequence[str], history: History, *, only: int | None = None
) -> Tally:
    """Run one block of sessions; with `only`, judge nothing but that session (the others are run all the same)."""
    chooser = random.Random(f"{seed} block {number}")
    template, seed_of_ids = chooser.choice(templates), chooser.getrandbits(32)
    stack = Stack(template, seed=seed_of_ids, base=chooser.random() < 0.1, parses=history == "follow" or chooser.random() < 0.9)
    stack.history = history
    whole = Tally()
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
    return whole


def run_blocks(seed: int, numbers: Sequence[int], turns: int, templates: Sequence[str], history: History = "supply") -> Tally:
    """Run some blocks, until all of them are done."""
    whole = Tally()
    sessions = -(-turns // CALLS)
    for number in numbers:
        mine = range(number * BLOCK, min((number + 1) * BLOCK, sessions))
        whole += asyncio.run(block(number, seed, mine, templates, history))
    return whole


def run(turns: int, seed: int, *, processes: int = 1, templates: Sequence[str] = (), history: History = "supply") -> Tally:
    """Run as many sessions as make so many turns."""
    templates = templates or tuple(ALL_KINDS)
    blocks = -(-turns // (CALLS * BLOCK))
    if processes <= 1:
        return run_blocks(seed, range(blocks), turns, templates, history)
    with multiprocessing.get_context("spawn").Pool(processes, logging.disable, (logging.CRITICAL,)) as pool:
        shares = [(seed, [number], turns, templates, history) for number in range(blocks)]
        whole = Tally()
        for tally in pool.starmap(run_blocks, shares, chunksize=1):
            whole += tally
    return whole


def replay(seed: int, session: int, templates: Sequence[str] = (), history: History = "supply") -> Tally:
    """Run one session again, behind those of its block that came before it."""
    number = session // BLOCK
    return asyncio.run(block(number, seed, range(number * BLOCK, session + 1), templates or tuple(ALL_KINDS), history, only=session))
