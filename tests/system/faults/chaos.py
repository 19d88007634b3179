"""The chaos campaign: many sessions on two replicas while one fault after the other is injected.

    make chaos                                    2,000 turns
    make chaos ARGS="--turns 400 --seed 3"

Agents in three dialects, streaming and not, with tools, forks and sub-agents, call a random replica each time; sometimes one disconnects in
the middle of a reply, and some break down at the first call that fails. Meanwhile disasters happen, one after the other, in an order that
the seed decides, each kind as often as any other. At the end everything the harnesses received is compared with the engines' own log and
with the exports that a trainer would fetch (`checker`). A second part breaks engines that have derender, so the replies that they break off
are continued. A last part does the same to a Redis without persistence, which restarts empty.

The exit code is 1 if anything was lost, false, misjudged, or missing without a mark. The seed decides what is requested, what breaks and in
which order; how calls and disasters coincide depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from tests.support.redis_server import RealRedis
from tests.support.waiting import until
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.disasters import Disasters
from tests.system.faults.harness import Agent, LeftError
from tests.system.faults.pipe import Pipe
from tests.system.faults.stack import Stack
from tests.system.faults.timeline import Timeline

if TYPE_CHECKING:
    from tests.system.faults.checker import Findings

OPTIONS = ("--store-timeout", "0.5", "--hold", "5", "--linger", "0.5")
LOGGED = ("--appendonly", "yes", "--appendfsync", "always")
"""With `everysec` Redis confirms writes that it has not written to its log yet, while the disk is busy. It loses them when it is killed."""
ENGINE = ("--token-delay", "0.002", "--chunk-tokens", "2")
DERENDERS = (*ENGINE, "--enable-scale-out", "--seed", "0")
"""Engines of one seed, as of the same weights: each can continue a reply of the other."""
BREAKS = ("engine-killed", "engine-no-done", "engine-error-event", "engine-torn-down", "engine-torn-down-at-once")
"""Disasters in which engines break replies off, and one engine is left to continue them."""
AT_ONCE, LONGEST = 12, 12
MOST = 40
"""Upper limit on the turns, as a multiple of those requested: on a busy machine many turns pass during one disaster."""
LEAVES = 0.03
"""How often a harness disconnects in the middle of a stream."""
FRAIL = 0.3
"""How many harnesses make each call once, and break down if it fails."""


@dataclass
class Campaign:
    """One campaign and its results.

    `frozen` is how many seconds Redis freezes, `kinds` are the permitted disasters (all, if none is named), `between` is how many turns
    pass from the end of one disaster to the next, `engine` are the options of the engines.
    """

    turns: int
    seed: int
    frozen: float = 1.0
    kinds: tuple[str, ...] = ()
    between: int = 10
    engine: tuple[str, ...] = ENGINE
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    agents: list[Agent] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._taken = 0
        self._over = self._all_struck = False
        self._news = asyncio.Condition()

    async def run(self, folder: Path) -> Findings:
        """Runs it; logs stay in `folder`."""
        began = time.monotonic()
        with (
            RealRedis(*LOGGED) as server,
            Pipe(server.port) as wire,
            Stack(folder, options=OPTIONS, engine=self.engine, engines=2, store=wire.url) as stack,
            closing(
                Disasters(
                    stack,
                    server,
                    wire,
                    self.timeline,
                    self.seed,
                    passing=self._passing,
                    attempts_over=self._attempts_over,
                    frozen=self.frozen,
                )
            ) as disasters,
        ):
            self.timeline.note("begins: " + ", ".join(f"{process.name} is {process.url}" for process in (*stack.proxies, *stack.engines)))
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
                group.create_task(self._inject(disasters))  # a failure on either side ends the other
                await asyncio.gather(*(self._work(n, http, stack) for n in range(AT_ONCE)))
                self._over = True
                await self._tell(0)
            self.timeline.note("ends")
            found = await asyncio.to_thread(stack.check, self.agents, finish=True)
        self.seconds = time.monotonic() - began
        self.ends = Counter(end for agent in self.agents for one in agent.asked for end in one.ends)
        return found

    async def _inject(self, disasters: Disasters) -> None:
        """Injects disasters until all turns are done; each kind once before any repeats."""
        kinds = sorted(self.kinds or disasters.all)
        rng = random.Random(self.seed + 1)
        while not self._over:
            rng.shuffle(kinds)
            for kind in kinds:
                await self._passing(self.between)
                if self._over:
                    return
                self.faults[kind] += 1
                await disasters.inject(kind)
            self._all_struck = True

    async def _passing(self, turns: int) -> None:
        """Waits until this many more turns are done or given up, or no more will be."""
        until = self._taken + turns
        async with self._news:
            await self._news.wait_for(lambda: self._over or self._taken >= until)

    async def _attempts_over(self) -> None:
        """Waits until all attempts that are under way have ended."""
        under_way = [(agent, agent.attempts) for agent in self.agents if agent.attempting]
        await until(lambda: not any(agent.attempting and agent.attempts == n for agent, n in under_way), "the end of attempts")

    async def _tell(self, turns: int) -> None:
        async with self._news:
            self._taken += turns
            self._news.notify_all()

    @property
    def _has_turns_left(self) -> bool:
        """Whether turns remain: as many as requested, and more until each kind of disaster has happened once."""
        return self._taken < self.turns or (not self._all_struck and self._taken < MOST * self.turns)

    async def _work(self, worker: int, http: aiohttp.ClientSession, stack: Stack) -> None:
        """Runs one session after the other."""
        rng = random.Random(f"{self.seed}:{worker}")
        number = 0
        while self._has_turns_left:
            number += 1
            tries = 1 if rng.random() < FRAIL else 8
            agent = Agent(
                f"w{worker}.{number}", rng.choice(DIALECTS), http, stack.urls, streams=rng.random() < 0.6, tries=tries, timeout_s=4.0,
                pause=0.2, rng=rng, watch=lambda events: self._leave(rng, events), note=self.timeline.note,
            )  # fmt: skip
            self.agents.append(agent)
            await self._episode(agent, rng)

    async def _episode(self, agent: Agent, rng: random.Random) -> None:
        stood = agent.remember()
        for _ in range(rng.randint(2, LONGEST)):
            if not self._has_turns_left:
                return
            move = rng.random()
            if move < 0.08:
                agent.start_over()
            elif move < 0.16:
                agent.go_back(stood)
            else:
                stood = agent.remember()
            said = await agent.turn(rng.choice(("Go on.", "And now?", "Weiter, bitte: naïve ☕", "Fix the failing test, and say why.")))
            await self._tell(1)
            if said is None and agent.tries == 1:
                return

    def _leave(self, rng: random.Random, events: int) -> None:
        if events in {1, 5, 15} and rng.random() < LEAVES:
            self.faults["harness-left"] += 1
            raise LeftError


async def run_empty(seed: int, folder: Path, agents_at_once: int = 12) -> Findings:
    """Kills a Redis without persistence and restarts it empty in the middle of some sessions, while others have ended."""
    rng = random.Random(seed)
    with Stack(folder, options=OPTIONS, engine=ENGINE) as stack:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            agents = [
                Agent(f"e{n}", DIALECTS[n % len(DIALECTS)], http, stack.urls, streams=n % 2 == 0, tries=8, timeout_s=4.0, rng=rng)
                for n in range(agents_at_once)
            ]
            for _ in range(3):
                await asyncio.gather(*(agent.turn() for agent in agents))
            going_on = agents[: agents_at_once * 2 // 3]
            under_way = [asyncio.create_task(agent.turn()) for agent in going_on]
            stack.redis.kill()
            await asyncio.to_thread(stack.redis.start)
            await asyncio.gather(*under_way)
            for proxy in stack.proxies:
                await asyncio.to_thread(proxy.ready)
            for _ in range(3):
                await asyncio.gather(*(agent.turn() for agent in going_on))
            return await asyncio.to_thread(stack.check, agents, memory_lost=True)


def explanation(campaign: Campaign, found: Findings) -> str:
    """Writes what was found, with the figures, and what happened to the sessions concerned."""
    return f"{report(campaign, found)}\n{found.words}\n{campaign.timeline.excerpt(found.suspects)}"


def report(campaign: Campaign, found: Findings) -> str:
    """Writes the figures of a campaign, a line each."""
    whole = len({agent.session for agent in campaign.agents}) - len(found.marked)
    reasons = Counter(kind for kinds in found.marked.values() for kind in kinds)
    lines = [
        ("turns", f"{sum(len(agent.asked) for agent in campaign.agents)} in {len(campaign.agents)} sessions, seed {campaign.seed}"),
        ("received whole", f"{found.turns}, of which recorded: {found.recorded}, continued after a cut: {found.continued}"),
        ("tries that failed", _counted(Counter({end: n for end, n in campaign.ends.items() if end != "received"}))),
        ("faults", f"{campaign.faults.total()}: {_counted(campaign.faults)}"),
        ("lost", str(len(found.lost))),
        ("false", str(len(found.false))),
        ("unmarked", str(len(found.unmarked))),
        ("unnamed", str(len(found.unnamed))),
        ("misjudged", f"{len(found.misjudged)} of the outcomes: {_counted(found.outcomes)}"),
        ("marked", f"{len(found.marked)} sessions ({whole} are whole): {_counted(reasons)}"),
        ("seconds", f"{campaign.seconds:.0f}"),
    ]
    return "\n".join(f"{name:<18} {value}" for name, value in lines)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"


def main() -> int:
    asked = argparse.ArgumentParser(prog="make chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--turns", type=int, default=2000)
    asked.add_argument("--seed", type=int, default=6)
    asked.add_argument("--frozen", type=float, default=30.0, help="how many seconds Redis freezes")
    asked.add_argument("--only", nargs="*", default=(), help="only these kinds of disasters")
    asked.add_argument("--keep", type=Path, help="folder for logs; it must exist and be empty")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokencache-chaos-") as folder:
        at = options.keep or Path(folder)
        campaign = Campaign(options.turns, options.seed, options.frozen, tuple(options.only))
        found = asyncio.run(campaign.run(at))
        print(report(campaign, found))
        (at / "continued").mkdir()
        continued = Campaign(options.turns // 5, options.seed, kinds=BREAKS, between=4, engine=DERENDERS)
        went_on = asyncio.run(continued.run(at / "continued"))
        print("with derender", report(continued, went_on), sep="\n")
        (at / "empty").mkdir()
        emptied = asyncio.run(run_empty(options.seed, at / "empty"))
    print(
        f"{'without a log':<18} {emptied.turns} received whole, {emptied.recorded} recorded; sessions: {len(emptied.gone)} gone, "
        f"{len(emptied.beheaded)} beheaded, {len(emptied.marked)} marked; lost {len(emptied.lost)}, false {len(emptied.false)}, "
        f"unmarked {len(emptied.unmarked)}, unnamed {len(emptied.unnamed)}"
    )
    for one, made in ((campaign, found), (continued, went_on)):
        if not made.clean:
            print(explanation(one, made), file=sys.stderr)
    if not emptied.clean:
        print(emptied.words, file=sys.stderr)
    return int(not (found.clean and went_on.clean and emptied.clean))


if __name__ == "__main__":
    sys.exit(main())
