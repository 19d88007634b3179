"""Many conversations at once: through the proxy every turn extends the previous one; directly on the engine hardly any does.

Extension is judged from the engine's answers: each contains the ids that it used and sampled, and the harness keeps them. The trajectories
that the proxy exports are then compared with what the harness received.
"""

import asyncio
import random
import time

import pytest
from conftest import proxying
from rig.exported import assert_exported, generations, trajectory, turns
from rig.harness import TOOLS
from rig.server import DTYPE, MODEL

from tokencache.store import open_store
from tokencache.store.memory import MemoryStore

TURNS = 5
AT_ONCE = 8
ERROR = {"float32": 2e-3, "bfloat16": 1.0}[DTYPE]
"""How far log probabilities computed one token at a time may be from those of the whole text.

In bfloat16 they differed by up to 0.7 on an H200, with 28 layers of random weights, for scripted tokens with one of about -25.
"""


def conversations(rollouts):
    """The variants of conversations: name, first words, and the options of the harness."""
    for episode in ("agent", "talk", "odd"):
        for rollout in range(rollouts):
            for stream in (False, True):
                yield f"{episode}-{rollout}-{'s' if stream else 'w'}", f"EPISODE:{episode} please", {"stream": stream, "tools": TOOLS}
    for n in range(12):
        fields = {"stream": bool(n % 2), "max_tokens": 24 + n, "seed": n, "chat_template_kwargs": {"enable_thinking": bool(n & 2)}}
        yield f"free-{n}", f"Say whatever you like, number {n}.", fields | ({"tools": TOOLS} if n % 3 == 0 else {})


async def converse(harness, first, gate):
    async with gate:
        harness.say(first)
        for n in range(TURNS):
            await harness.turn(then=f"Go on, please: {n} ☕", answer=f"total {n}\n-rw-r--r--  a.txt\n")
    return harness


async def converse_all(make, rollouts=2):
    gate = asyncio.Semaphore(AT_ONCE)
    return await asyncio.gather(*(converse(make(name, fields), first, gate) for name, first, fields in conversations(rollouts)))


def count(harnesses):
    pairs = [harness.contiguous for harness in harnesses]
    return sum(done for done, _ in pairs), sum(of for _, of in pairs)


@pytest.fixture(params=["memory", "redis"])
def store(request):
    """Where the proxy keeps turns. Redis is a real server that the test starts."""
    if request.param == "memory":
        yield MemoryStore()
        return
    redis_server = pytest.importorskip("tests.support.redis_server")
    with redis_server.RealRedis() as server:
        yield open_store(server.url)


def note(figures, what, done, of, seconds):
    figures.append(f"{what:<34} {done:>4} of {of} turns extend the one before, {seconds:.1f} s")


async def test_every_turn_extends_the_previous_one(vllm, tokenizer, store, figures):
    began = time.monotonic()
    async with proxying(vllm, store) as proxied:
        harnesses = await converse_all(lambda name, fields: proxied.harness(name, **fields))
        done, of = count(harnesses)
        note(figures, f"proxied, {type(store).__name__}, {tokenizer}:", done, of, time.monotonic() - began)
        assert len(harnesses) >= 24
        assert of == len(harnesses) * (TURNS - 1)
        assert done == of
        for harness in harnesses:
            assert_exported(await trajectory(proxied, harness.session), harness.answered)
            matches = [(turn["match"], turn["reason"]) for turn in await turns(proxied, harness.session)]
            assert matches == [("root", ""), *[("continue", "")] * (TURNS - 1)]
        for harness in (harnesses[0], harnesses[7], harnesses[14], harnesses[-1]):
            await read_again(proxied, harness.session)


async def read_again(proxied, session):
    """Given the exported ids to read, the model computes the log probabilities that were recorded: they belong together."""
    (sequence,) = (await trajectory(proxied, session))["sequences"]
    ids = sequence["token_ids"]
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    read = (await proxied.post("/v1/completions", body))["choices"][0]["prompt_logprobs"]
    trained = [at for at, mask in enumerate(sequence["loss_mask"]) if mask]
    found = [read[at][str(ids[at])]["logprob"] for at in trained]
    recorded = [sequence["logprobs"][at] for at in trained]
    assert len(found) > 50
    assert found == pytest.approx(recorded, abs=ERROR)
    assert found[1:] != pytest.approx(recorded[:-1], abs=0.5)  # a log probability at the wrong token would differ


@pytest.mark.parametrize("faithful", [False, True], ids=["forgetful", "faithful"])
async def test_directly_hardly_any_turn_extends_the_previous_one(vllm, proxied, tokenizer, figures, faithful):
    """Not even if a harness sends back every byte that it received, including reasoning: the tokens differ."""
    began = time.monotonic()
    harnesses = await converse_all(lambda _, fields: proxied.direct(faithful=faithful, **fields))
    done, of = count(harnesses)
    note(figures, f"direct, {'faithful' if faithful else 'forgetful'}, {tokenizer}:", done, of, time.monotonic() - began)
    assert done < of / 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_harness_that_requests_no_ids(proxied, stream):
    """Most harnesses request no ids: they get none, and the session is just as exact, which reading it again verifies."""
    harness = proxied.harness("quiet", stream=stream, tools=TOOLS, ids=False).say("EPISODE:agent please")
    for _ in range(TURNS):
        reply = await harness.turn()
        assert not reply.prompt
        assert not reply.ids
        assert b'"token_ids":[' not in reply.raw
        assert b'"logprob"' not in reply.raw
    exported = await trajectory(proxied, "quiet")
    assert exported["complete"]
    (sequence,) = exported["sequences"]
    assert [turn["match"] for turn in sequence["turns"]] == ["root"] + ["continue"] * (TURNS - 1)
    assert len(generations(exported)) == TURNS
    await read_again(proxied, "quiet")


@pytest.mark.parametrize("tokenizer", ["qwen3"], indirect=True)
async def test_with_the_tokenizer_of_qwen3(vllm, tokenizer, figures):
    """The same with Qwen3's own tokenizer and template, if `../shared` exists."""
    await test_every_turn_extends_the_previous_one(vllm, tokenizer, MemoryStore(), figures)
    async with proxying(vllm, MemoryStore()) as proxied:
        await test_directly_hardly_any_turn_extends_the_previous_one(vllm, proxied, tokenizer, figures, faithful=True)


async def test_rollouts_of_one_task_do_not_mix(proxied):
    """Sibling rollouts emit the same text in other tokens, at the same time: each keeps its own."""
    rng = random.Random(3)
    harnesses = [proxied.harness(f"sibling-{n}", stream=rng.random() < 0.5, tools=TOOLS).say("EPISODE:agent please") for n in range(6)]
    for _ in range(4):
        await asyncio.gather(*(harness.turn() for harness in harnesses))
    assert len({tuple(harness.replies[-1].prefix) for harness in harnesses}) == len(harnesses)
    for harness in harnesses:
        assert harness.contiguous == (3, 3)
        assert_exported(await trajectory(proxied, harness.session), harness.answered)
