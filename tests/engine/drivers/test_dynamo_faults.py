"""Workers that come and go behind Dynamo's frontend, and a frontend that is restarted, under many streams."""

import asyncio
import contextlib
import json
import random
from collections import Counter

import pytest

from tests.engine.drivers.dynamo_frontend import DynamoFrontend
from tests.ports import free_port
from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, assembled, echo, proxied, results, user
from tests.support import invariants
from tests.support.waiting import PATIENCE, until
from tokencache.proxy import dispatch
from tokencache.testing import SimulatedEngine

SESSIONS, TURNS = 64, 4
LOST = {"engine-error", "upstream-broke"}
"""What marks a reply that its worker, or the frontend, did not end: a hole."""
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")


@pytest.fixture(autouse=True)
def briskly(monkeypatch):
    monkeypatch.setattr(dispatch, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(dispatch, "LONGEST_PAUSE", 0.02)


class Restless(DynamoFrontend):
    """Workers that come and go: some streams lose theirs, and for some requests afterwards no worker is there.

    `restless` is whether they do now.
    """

    def __init__(self, upstream, seed):
        super().__init__(upstream)
        self.restless, self._rng, self._away = False, random.Random(seed), 0

    async def _pass(self, request):
        self.ready = self._away <= 0
        self._away -= request.method == "POST"
        return await super()._pass(request)

    def lifetime(self):
        if not self.restless or self._rng.random() > 0.4:
            return None
        self._away = self._rng.randrange(4)
        return self._rng.randrange(8)


class Agent:
    """A harness that repeats a call whose stream breaks off, and keeps what it received of whole replies."""

    def __init__(self, rig, session):
        self.rig, self.session = rig, session
        self.messages = [user(f"EPISODE:demo of {session}")]
        self.whole, self.lost = 0, 0

    async def run(self):
        for _ in range(TURNS):
            while (message := await self._ask()) is None:
                self.lost += 1
            self.whole += 1
            self.messages += [echo(message), *results(message)]

    async def _ask(self):
        body = {"model": "sim", "messages": self.messages, "tools": TOOLS, "stream": True}
        async with self.rig.http.post(self.rig.url + CHAT, json=body, headers={HEADER: self.session}) as answer:
            text = await answer.text()
        if answer.status == 502:  # it was gone before it had answered
            return None
        assert answer.status == 200, text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return None if any("error" in event for event in events) else assembled(events)


@contextlib.asynccontextmanager
async def before(frontend, engine, port):
    async with proxied(engine, upstream=f"http://127.0.0.1:{port}", engine_kind="dynamo", hold=PATIENCE) as rig:
        await rig.proxy.engine.model("sim")
        engine.ground_truth.clear()
        yield rig


async def judge(rig, agents):
    """Nothing false, nothing twice, and each reply that a harness did not receive whole is a hole."""
    assert sum(agent.whole for agent in agents) == SESSIONS * TURNS
    for agent in agents:
        exported = await rig.exported(agent.session)
        holes = [incident for incident in exported["incidents"] if incident["hole"]]
        assert len({hole["call"] for hole in holes}) == agent.lost, holes
        assert {incident["kind"] for incident in holes} <= LOST | {"no-token-ids"}
        assert exported["complete"] is not bool(agent.lost)
        assert not [incident["kind"] for incident in exported["incidents"] if not incident["hole"] and incident["kind"] != "held"]
        truth = [entry for entry in rig.ground_truth(agent.session) if entry.completion_ids]
        left = Counter((tuple(entry.prompt_ids), tuple(entry.completion_ids), tuple(entry.logprobs)) for entry in truth)
        whole = 0
        for sequence in exported["sequences"]:
            ids, logprobs = sequence["token_ids"], sequence["logprobs"]
            for turn in sequence["turns"]:
                start, end = turn["completion"]
                trained = tuple(ids[:start]), tuple(ids[start:end]), tuple(logprobs[start:end])
                if LOST & {*turn["marks"]}:
                    assert any(p == trained[0] and s[: len(trained[1])] == trained[1] for p, s, _ in left)
                    continue
                whole += 1
                assert left[trained] > 0
                left[trained] -= 1
                assert turn["match"] in {"root", "continue", "branch"}, turn["reason"]
        assert whole == TURNS
        known = await rig.store.turns(agent.session)
        tokens = await rig.store.tokens(agent.session, [turn.id for turn in known])
        assert not invariants.audit(known, tokens, session=agent.session)


async def test_workers_that_come_and_go_under_64_streams():
    engine, port = SimulatedEngine(episodes=EPISODES, seed=7), free_port()
    async with engine.serve() as up:
        frontend = Restless(up, seed=3)
        async with frontend.serve(port), before(frontend, engine, port) as rig:
            frontend.restless = True
            agents = [Agent(rig, f"s{n}") for n in range(SESSIONS)]
            await asyncio.gather(*(agent.run() for agent in agents))
            frontend.restless, frontend._away = False, 0
            await judge(rig, agents)
            assert sum(agent.lost for agent in agents) > 10


async def test_a_frontend_that_is_restarted_under_64_streams():
    engine, port = SimulatedEngine(episodes=EPISODES, seed=7), free_port()
    async with engine.serve() as up:
        frontend = DynamoFrontend(up)
        async with contextlib.AsyncExitStack() as first:
            await first.enter_async_context(frontend.serve(port))
            async with before(frontend, engine, port) as rig:
                agents = [Agent(rig, f"s{n}") for n in range(SESSIONS)]
                running = asyncio.gather(*(agent.run() for agent in agents))
                await until(lambda: len(frontend.asked) > SESSIONS)
                await first.aclose()
                await until(lambda: not rig.proxy.engine.models)  # a call, or a check, has found that it is gone
                async with DynamoFrontend(up).serve(port):
                    await running
                    await judge(rig, agents)
                    assert sum(agent.lost for agent in agents) > 0
