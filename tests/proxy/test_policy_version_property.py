"""Every token's span has the version that sampled it, or says that this is not certain; so has every prompt.

Random updates of the weights run while random calls go through two replicas to two engines, which also restart. The engines know the truth:
which weights sampled each token, and which computed each key and value.
"""

import asyncio
import contextlib
import random

import msgspec
import pytest

from tests.proxy.kit import EPISODES, HEADER, TOOLS, proxied, user
from tests.proxy.test_several_engines import Fleet, serving
from tests.support.pairwise import seeds
from tests.support.plugin_engine import PluginEngine
from tokencache.core import ids
from tokencache.core.weights import MIXED
from tokencache.proxy import dispatch
from tokencache.store.memory import MemoryStore
from tokencache.testing.ground_truth import GroundTruthEntry

WEIGHTS = "/tokencache/v1/weights"
MODES = ("abort", "keep", "wait", "none", "announced", "declared")
TALK = "One, two, three, four, five, six, seven, eight. " * 6
SEEDS = seeds(2, 12)


@pytest.fixture(autouse=True)
def _briskly(monkeypatch):
    monkeypatch.setattr(dispatch, "FIRST_PAUSE", 0.005)
    monkeypatch.setattr(dispatch, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.02)


def wrong(turn, entry):
    """The checker: what a recorded turn says about versions against what its engine knows; one string for each false statement."""
    found = []
    end = 0
    for span in turn.versions:
        if span["start"] != end or span["end"] <= span["start"]:
            found.append(f"turn {turn.id}: its spans leave a gap or overlap at {span}")
        end = span["end"]
        truth = set(entry.versions[span["start"] : span["end"]])
        if span["version"] != MIXED and truth != {span["version"]}:
            found.append(f"turn {turn.id}: {span}, but the tokens were sampled by {sorted(truth)}")
    if turn.versions and end != turn.completion_tokens:
        found.append(f"turn {turn.id}: its spans end at {end} of {turn.completion_tokens}")
    computed = set(entry.prompt_versions)
    if turn.prompt_version not in {"", MIXED} and computed != {turn.prompt_version}:
        found.append(f"turn {turn.id}: its prompt was computed by {sorted(computed)}, not {turn.prompt_version}")
    return found


class World:
    """Two engines, two replicas over one store, and a trainer."""

    def __init__(self, seed, fleet, replicas):
        self.rng, self.fleet, self.replicas = random.Random(seed), fleet, replicas
        self.version = 1

    async def ask(self, method, path, **body):
        rig = self.rng.choice(self.replicas)
        async with rig.http.request(method, rig.url + path, json=body) as answer:
            return await answer.json()

    async def load(self):
        self.version += 1
        for engine in self.fleet.engines:
            await asyncio.sleep(self.rng.uniform(0, 0.02))
            engine.weights.loaded = engine.weights.label = f"v{self.version}"
        await asyncio.sleep(self.rng.uniform(0, 0.02))

    async def pause(self, mode, clear):
        rig = self.replicas[0]
        for url in self.fleet.urls:
            async with rig.http.post(f"{url}/pause?mode={mode}&clear_cache={clear}") as answer:
                assert answer.status == 200

    async def resume(self):
        for url in self.fleet.urls:
            async with self.replicas[0].http.post(f"{url}/resume") as answer:
                assert answer.status == 200

    async def update(self):
        """Replace the weights as one of the trainers does: by the procedure, or by own pauses with or without saying so."""
        mode, clear = self.rng.choice(MODES), self.rng.random() < 0.5
        if mode in {"announced", "declared"}:
            pause = self.rng.choice(["abort", "keep", "wait"])
            said = {"mode": pause, "clear_cache": clear} if mode == "declared" else {}
            await self.ask("PUT", WEIGHTS, phase="updating", **said)
            await self.pause(pause, str(clear).lower())
            await self.load()
            await self.ask("PUT", WEIGHTS, version=f"v{self.version}")
            await self.resume()
            return
        begun = await self.ask("POST", f"{WEIGHTS}/update", mode=mode, clear_cache=clear)
        await self.load()
        if self.rng.random() < 0.8:
            await self.ask("POST", f"{WEIGHTS}/update/{begun['id']}/finish", version=f"v{self.version}")
        else:
            await self.ask("DELETE", f"{WEIGHTS}/update/{begun['id']}")

    async def train(self):
        for _ in range(self.rng.randrange(2, 6)):
            await asyncio.sleep(self.rng.uniform(0, 0.05))
            if self.rng.random() < 0.2:
                place = self.rng.randrange(2)
                await self.fleet.stop(place)  # a restart with an empty cache, and the newest weights
                self.fleet.engines[place].weights.clear(running=False)
                await self.fleet.start(place)
            await self.update()

    async def roll(self, session):
        messages = [user(f"EPISODE:demo {session} {TALK}")]
        for _ in range(4):
            rig = self.rng.choice(self.replicas)
            body = {"model": "sim", "messages": messages, "tools": TOOLS, "stream": self.rng.random() < 0.5, "max_tokens": 60}
            with contextlib.suppress(Exception):  # an engine may restart in mid-reply; what was recorded is checked all the same
                async with rig.http.post(rig.url + "/v1/chat/completions", json=body, headers={HEADER: session}) as answer:
                    await answer.read()
            messages = [*messages, user("go on")]


@contextlib.asynccontextmanager
async def world(seed, kv):
    """A world in which `v1` is announced."""
    rng = random.Random(seed)
    engines = [PluginEngine(episodes=EPISODES, seed=number, dev_mode=True, token_delay=0.0005) for number in range(2)]
    style = rng.choice(["", "", "spans"])
    for engine in engines:
        engine.weights.loaded = engine.weights.label = "v1"
        engine.metadata.style = style
    store = MemoryStore()
    async with Fleet(engines) as fleet, contextlib.AsyncExitStack() as stack:
        settings = {"upstream": ",".join(fleet.urls), "hold": 30, "kv": kv}
        replicas = [await stack.enter_async_context(proxied(None, store, **settings)) for _ in range(2)]
        for replica in replicas:
            await serving(replica, 2)
        made = World(seed, fleet, replicas)
        await made.ask("PUT", WEIGHTS, version="v1")
        yield made, store


def truth_of(fleet, turn, completion):
    """The engine's own entry of a turn; that of a continued reply is put together from those of its pieces."""
    calls = {turn.call, *(piece.call for piece in turn.pieces)}
    entries = [entry for entry in fleet.ground_truth if entry.completion_ids and any(call in entry.request_id for call in calls)]
    first = entries[0]
    truth = GroundTruthEntry("", 0, None, "", stream=False, ids_supplied=True, prompt_ids=first.prompt_ids)
    truth.prompt_versions = first.prompt_versions
    for entry in entries:
        truth.completion_ids += entry.completion_ids
        truth.versions += entry.versions
    assert truth.completion_ids[: len(completion)] == completion, "the turn is not what the engines sampled"
    return truth


async def rollouts(seed, kv="exact"):
    """Random rollouts under random updates: each recorded turn with the engine's own entry."""
    async with world(seed, kv) as (made, store):
        sessions = [f"s{number}" for number in range(6)]
        await asyncio.gather(made.train(), *map(made.roll, sessions))
        found = []
        for session in sessions:
            turns = [turn for turn in await store.turns(session) if turn.completion_tokens]
            tokens = await store.tokens(session, [turn.id for turn in turns])
            found += [(turn, truth_of(made.fleet, turn, ids.unpack(tokens[turn.id].completion))) for turn in turns]
        return found


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_span_and_no_prompt_has_another_version_than_its_own(seed):
    found = await rollouts(seed, random.Random(seed).choice(["exact", "exact", "session"]))
    assert [problem for turn, entry in found for problem in wrong(turn, entry)] == []


async def test_without_salts_prompts_are_stale_and_no_turn_says_otherwise():
    for seed in range(4):
        found = await rollouts(seed, "off")
        assert [problem for turn, entry in found for problem in wrong(turn, entry)] == []
        if any(len(set(entry.prompt_versions)) > 1 for _, entry in found):
            return
    pytest.fail("no prompt was stale")


async def a_certain_turn():
    for seed in range(4):
        for turn, entry in await rollouts(seed):
            if turn.prompt_version not in {"", MIXED}:
                return turn, entry
    return pytest.fail("no turn names the version of its prompt")


async def test_the_checker_finds_what_is_false():
    turn, entry = await a_certain_turn()
    assert wrong(turn, entry) == []
    (span, *_), end = turn.versions, turn.completion_tokens
    false = {
        "the tokens were sampled by": {"versions": [{**span, "version": "v99", "end": end}]},
        "its spans leave a gap": {"versions": [{**span, "start": 1}]},
        "its spans end at": {"versions": [{**span, "end": end - 1}]},
        "its prompt was computed by": {"prompt_version": "v99"},
    }
    for words, changed in false.items():
        assert any(words in problem for problem in wrong(msgspec.structs.replace(turn, **changed), entry)), words
