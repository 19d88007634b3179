"""Several engines behind one proxy: each session keeps to one, and goes on elsewhere when that one goes."""

import asyncio
import contextlib
from collections import Counter

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from tests.engine.intermediary import Intermediary
from tests.ports import free_port
from tests.proxy.kit import EPISODES, HEADER, TOOLS, echo, proxied, results, user
from tests.support.waiting import PATIENCE, until
from tokencache import cli
from tokencache.config import Settings, names_in
from tokencache.engine.pool import preference
from tokencache.proxy import dispatch
from tokencache.testing import SimulatedEngine

ASK = {"messages": [user("EPISODE:demo")], "tools": TOOLS}
SESSIONS = [f"s{n}" for n in range(8)]


class Fleet:
    """Engines that can be stopped and started; a rig uses them as one engine with one ground-truth log."""

    def __init__(self, engines):
        self.engines = engines
        self.urls = []
        self._ports, self._running = [], {}

    @property
    def ground_truth(self):
        return [entry for engine in self.engines for entry in engine.ground_truth]

    async def start(self, place):
        stack = self._running[place] = contextlib.AsyncExitStack()
        await stack.enter_async_context(self.engines[place].serve(port=self._ports[place]))

    async def stop(self, place):
        await self._running.pop(place).aclose()

    async def __aenter__(self):
        for place, _ in enumerate(self.engines):
            self._ports.append(free_port())
            await self.start(place)
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        return self

    async def __aexit__(self, *_):
        for place in list(self._running):
            await self.stop(place)

    def home(self, session):
        """The place of the engine that got the first call of a session."""
        return self.asked(session)[0]

    def asked(self, session):
        """The places of the engines that were asked for this session, in order."""
        return [place for place, engine in enumerate(self.engines) for entry in engine.ground_truth if entry.session == session]


@pytest.fixture(autouse=True)
def _briskly(monkeypatch):
    monkeypatch.setattr(dispatch, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(dispatch, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.02)


@contextlib.asynccontextmanager
async def fleet(*engines, serve=None, **settings):
    """A proxy before engines (three alike, if none are given), once all of those in `serve` (all of them) serve."""
    engines = engines or [SimulatedEngine(episodes=EPISODES, seed=7) for _ in range(3)]
    async with Fleet(list(engines)) as made, proxied(upstream=",".join(made.urls), hold=PATIENCE, **settings) as rig:
        rig.engine = made
        await serving(rig, len(engines) if serve is None else serve)
        yield rig, made


async def ready(rig):
    async with rig.http.get(rig.url + "/readyz") as answer:
        return await answer.json()


async def serving(rig, count):
    async def found():
        return sum(engine["serves"] for engine in (await ready(rig))["engines"]) == count

    await until(found)


async def episode(rig, session, turns=3, messages=None):
    messages = list(messages or ASK["messages"])
    for _ in range(turns):
        message = await rig.say(session, messages, tools=TOOLS)
        messages += [echo(message), *results(message)]
    return messages


@pytest.mark.parametrize("placement", ["sticky", "hash"])
async def test_each_session_keeps_to_its_engine(placement):
    async with fleet(placement=placement) as (rig, made):
        await asyncio.gather(*(episode(rig, session) for session in SESSIONS))
        for session in SESSIONS:
            assert made.asked(session) == [made.home(session)] * 3
            await rig.check(session)
        homes = {session: made.home(session) for session in SESSIONS}
        if placement == "hash":
            assert homes == {session: preference(session, made.urls)[0] for session in SESSIONS}
        else:
            assert sorted(Counter(homes.values()).values()) == [2, 3, 3]
        text = await (await rig.http.get(rig.url + "/metrics")).text()
        for url in made.urls:
            assert f'tokencache_engine_up{{engine="{url}"}} 1.0' in text
        assert sum(f'tokencache_engine_calls_total{{engine="{url}"}}' in text for url in made.urls) > 1


async def test_sub_agents_stay_with_their_session():
    """What they share, the tools and the beginning of the prompt, is in that engine's cache."""
    async with fleet() as (rig, made):
        messages = await episode(rig, "s", 1)
        await asyncio.gather(*(rig.say("s", [user(f"sub-agent {n}")]) for n in range(4)), rig.say("s", messages, tools=TOOLS))
        assert len(set(made.asked("s"))) == 1


@pytest.mark.parametrize(("stream", "placement"), [(False, "sticky"), (True, "sticky"), (False, "hash")])
async def test_a_session_whose_engine_goes_continues_elsewhere_on_the_same_ids(stream, placement):
    async with fleet(placement=placement) as (rig, made):
        begun = {session: await episode(rig, session, 2) for session in SESSIONS}
        homes = {session: made.home(session) for session in SESSIONS}
        gone = homes["s0"]
        await made.stop(gone)
        for session, messages in begun.items():
            await rig.say(session, messages, tools=TOOLS, stream=stream)
            exported = await rig.check(session)
            assert [turn["match"] for turn in await rig.turns(session)] == ["root", "continue", "continue"]
            assert (exported["complete"], exported["incidents"]) == (True, [])
            (last,) = (Counter(made.asked(session)) - Counter([homes[session]] * 2)).elements()
            assert (last == homes[session]) == (homes[session] != gone)
        await serving(rig, 2)
        states = {engine["url"]: engine for engine in (await ready(rig))["engines"]}
        assert "cannot be reached" in states[made.urls[gone]]["error"]
        await made.start(gone)
        await serving(rig, 3)
        await rig.say("s0", ASK["messages"], tools=TOOLS)
        # By the hash it returns home. By load it stays where its prefix is now.
        assert [e.session for e in made.engines[gone].ground_truth].count("s0") == (3 if placement == "hash" else 2)


async def test_all_engines_fail_and_one_returns():
    async with fleet() as (rig, made):
        messages = await episode(rig, "s", 2)
        for place in range(3):
            await made.stop(place)
        call = asyncio.create_task(rig.say("s", messages, tools=TOOLS))
        other = (made.home("s") + 1) % 3
        await serving(rig, 0)
        await made.start(other)
        await call
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        assert "s" in {entry.session for entry in made.engines[other].ground_truth}
        assert (await rig.check())["complete"]


async def test_one_engine_is_paused_and_the_others_take_its_calls():
    async with fleet() as (rig, made):
        messages = await episode(rig, "s", 2)
        home = made.home("s")
        made.engines[home].pause()
        await rig.say("s", messages, tools=TOOLS)
        assert len([place for place in made.asked("s") if place != home]) == 1
        assert not (await rig.info())["incidents"]  # it did not have to wait
        assert (await ready(rig))["ready"]


async def test_an_engine_that_does_less_is_left_alone_and_named(caplog):
    """A session would lose its exactness there, without a word to anybody."""
    lesser = SimulatedEngine(episodes=EPISODES, seed=7, honours_ids=False)
    alike = [SimulatedEngine(episodes=EPISODES, seed=7) for _ in range(2)]
    async with fleet(lesser, *alike, serve=2) as (rig, made):

        async def named():
            return [engine["error"] for engine in (await ready(rig))["engines"] if "it waits" in engine["error"]]

        (why,) = await until(named)
        assert "level is record, not exact" in why
        assert any("it waits" in record.message and made.urls[0] in record.message for record in caplog.records)
        for session in SESSIONS:
            await episode(rig, session, 2)
            await rig.check(session)
        assert not [entry for entry in lesser.ground_truth if entry.session]
        for place in (1, 2):
            await made.stop(place)
        await serving(rig, 0)
        call = asyncio.create_task(rig.say("s0", ASK["messages"], tools=TOOLS))  # waits for its kind, however ready the lesser one is
        await asyncio.sleep(0)
        await made.start(1)
        await call
        assert not [entry for entry in lesser.ground_truth if entry.session]


async def test_different_versions_of_one_kind_serve_together_and_are_named(caplog):
    made = [SimulatedEngine(episodes=EPISODES, seed=7, version=version) for version in ("0.32.0", "0.33.0")]
    async with fleet(*made) as (rig, _):

        async def named():
            return any("different versions" in record.message for record in caplog.records)

        await until(named)
        assert (await ready(rig))["ready"]


async def test_an_engine_that_returns_as_something_else_is_not_used():
    async with fleet() as (rig, made):
        messages = await episode(rig, "s", 2)
        home = made.home("s")
        await made.stop(home)
        made.engines[home].honours_ids = False
        await rig.say("s", messages, tools=TOOLS)
        await made.start(home)

        async def named():
            return [engine["error"] for engine in (await ready(rig))["engines"] if "it waits" in engine["error"]]

        await until(named)
        asked = len(made.engines[home].ground_truth)
        await episode(rig, "s", 2)
        assert not [entry for entry in made.engines[home].ground_truth[asked:] if entry.session]
        await rig.check()


async def test_an_engine_that_returns_on_another_day_serves(monkeypatch):
    """A template writes the date (gpt-oss, Llama 3.1): what an engine rendered yesterday is not compared with what one renders today."""
    monkeypatch.setattr("tokencache.engine.health.RECONSIDER_SECONDS", 0.1)
    today = ["2026-11-27"]

    def dated(_route, body):
        date = {"role": "system", "content": f"Today is {today[0]}."}
        return {**body, "messages": [date, *body["messages"]]} if "messages" in body else body

    async with contextlib.AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(Intermediary(await stack.enter_async_context(SimulatedEngine().serve()), dated).serve())
            for _ in range(3)
        ]
        rig = await stack.enter_async_context(proxied(upstream=",".join(urls)))
        await serving(rig, 3)
        today[0] = "2026-11-28"
        rig.proxy.pool.monitors[1].mark_down("it starts again")
        await serving(rig, 3)


async def test_without_a_session_they_take_turns_and_an_engine_that_is_gone_is_passed_over():
    async with fleet() as (rig, made):
        for _ in range(6):
            assert (await rig.post(None, **ASK))[0] == 200
        assert [len([e for e in engine.requests if e.get("tools") == TOOLS]) for engine in made.engines] == [2, 2, 2]
        await made.stop(0)
        for _ in range(4):
            assert (await rig.post(None, **ASK))[0] == 200


async def test_other_routes_of_a_session_go_where_it_is():
    async with fleet() as (rig, made):
        for session in SESSIONS[:3]:
            await episode(rig, session, 1)
            await rig.http.post(rig.url + "/tokenize", json={"model": "sim", "prompt": session}, headers={HEADER: session})
            assert made.engines[made.home(session)].tokenizations[-1].get("prompt") == session


async def test_every_call_has_its_own_id_and_names_its_session():
    """Two requests with one id get in each other's way in the engine; the harness's own is still to be found there."""
    async with fleet(affinity_headers="X-Session-ID,x-smg-routing-key") as (rig, made):
        status, _ = await rig.post("s", named="mine", **ASK)
        others = [rig.post("s", named="mine", messages=[user(f"hi {n}")]) for n in range(3)]
        await asyncio.gather(*others, rig.post("s", **ASK))
        assert status == 200
        sent = [{k.lower(): v for k, v in headers.items()} for headers in made.engines[made.home("s")].headers]
        sent = [headers for headers in sent if headers.get("x-session-id") == "s"]
        ids = [headers["x-request-id"] for headers in sent]
        assert len(set(ids)) == len(ids) == 5
        assert sum(name.startswith("mine-") for name in ids) == 4
        assert {name.rpartition("-")[2] for name in ids} == {turn["call"] for turn in await rig.turns()}
        assert {headers["x-smg-routing-key"] for headers in sent} == {"s"}


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--upstream", "http://a:1", "--upstream", "http://b:2/v1"], {}),
        (["--upstream", "http://a:1, http://b:2/v1"], {}),
        ([], {"TOKENCACHE_UPSTREAM": "http://a:1,http://b:2/v1"}),
    ],
)
def test_how_engines_are_named(monkeypatch, arguments, environment):
    taken = []

    async def run(settings):
        taken.extend(names_in(settings.upstream))

    monkeypatch.setattr(cli, "run", run)
    result = CliRunner().invoke(cli.app, ["serve", *arguments], env=environment)
    assert (result.exit_code, taken) == (0, ["http://a:1", "http://b:2/v1"]), result.output


@pytest.mark.parametrize("upstream", ["a:8000", "http://a:1,b:2", "http://a:1,http://a:1/v1/"])
def test_what_names_no_engines(upstream):
    with pytest.raises(ValidationError, match=r"base URLs|named twice"):
        Settings(upstream=upstream)
