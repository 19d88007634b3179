"""Replies that a real vLLM breaks off go on where they stopped: paused as for new weights, cut at any token, killed with `kill -9`."""

import asyncio
import json

import aiohttp
import pytest
from conftest import EPISODES, MAX_MODEL_LEN, GroundTruth, Proxied, proxying
from rig.agent import Agent
from rig.breaking_relay import BreakingRelay
from rig.exported import generations, generations_of, get_json
from rig.harness import TOOLS
from rig.marks import marks_of
from rig.model import make_model
from rig.replica import replica
from rig.server import LIMIT_S, MODEL, VllmServer, all_started
from test_weight_updates import get_json as post
from test_weight_updates import sampled
from typer.testing import CliRunner

from tests.support import invariants
from tests.support.waiting import until
from tokencache.cli import app
from tokencache.core import ids
from tokencache.store.memory import MemoryStore
from tokencache.testing import build_tokenizer

CUTS = 5
STREAMS = 64
PACE, SLOW_PACE = 0.01, 0.5
"""Seconds of a step: usually, and until an engine is killed, so that no reply of 64 ends before that, however busy the machine is."""
AT_ONCE = 32
"""Cut replies in progress at a time."""
KINDS = {"chat": 42, "whole": 6, "messages": 8, "responses": 8}
"""How many sessions of each kind there are when the engine is killed."""
ENDED = {"messages": "tool_use", "responses": "completed"}


@pytest.fixture
def engines(servers, tmp_path_factory):
    """Two engines with the same weights, in development mode and with derender. They sample slowly, 64 replies at a time.

    Prompts are computed whole, because a CPU engine ends at one that has a seed and is computed in chunks (vLLM 0.32).
    """

    def start():
        model = make_model(servers.tokenizer_dir("own"), tmp_path_factory.mktemp("model"))
        made = []
        for _ in range(2):
            folder = tmp_path_factory.mktemp("vllm")
            options = ["--enable-scale-out", "--max-num-seqs", str(STREAMS), "--max-num-batched-tokens", str(MAX_MODEL_LEN)]
            more = {"ground_truth": folder / "ground_truth.jsonl", "variables": {"VLLM_SERVER_DEV_MODE": "1"}, "pace": PACE}
            made.append(VllmServer(model, EPISODES, max_model_len=MAX_MODEL_LEN, workdir=folder, options=options, **more))
        return all_started(*made)

    return servers.keep("two engines", start)


async def recorded_prefix(proxied, turn):
    return ids.unpack((await proxied.proxy.ledger.prefixes.get("s", turn.id)).prefix.ids)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_reply_that_is_cut_five_times_is_one_reply(engines, figures, stream):
    """Paused with `/pause?mode=abort` and resumed, as trainers do."""
    async with proxying(engines[0].url, MemoryStore(), hold=LIMIT_S) as proxied, asyncio.timeout(LIMIT_S):
        uncut = proxied.harness("uncut").say("EPISODE:count")
        await uncut.turn()
        expected = await uncut.turn(stream=stream)
        harness = proxied.harness("s").say("EPISODE:count")
        await harness.turn()
        call = asyncio.create_task(harness.turn(stream=stream))
        for _ in range(CUTS):
            before = await sampled(proxied)
            while await sampled(proxied) < before + 15:
                assert not call.done()
                await asyncio.sleep(0.01)
            await post(proxied, "/pause?mode=abort")
            await post(proxied, "/resume")
        reply = await call
        assert (reply.message, reply.finish_reason) == (expected.message, "stop")
        turns = await proxied.proxy.store.turns("s")
        tokens = await proxied.proxy.store.tokens("s", [turn.id for turn in turns])
        assert not invariants.audit(turns, tokens, session="s")
        _, turn = turns
        assert len(turn.pieces) == CUTS + 1
        assert [piece.ended for piece in turn.pieces] == ["abort"] * CUTS + ["stop"]
        assert reply.ids == ids.unpack(tokens[turn.id].completion)
        assert (marks_of(turn), turn.again) == (["continued"], "")
        later = await harness.turn()
        assert later.prompt[: turn.prompt_tokens + turn.completion_tokens] == await recorded_prefix(proxied, turn)
        figures.append(f"five aborts, stream={stream}: pieces {[(piece.start, piece.end) for piece in turn.pieces]}")


def said(reply):
    """What a harness has of a reply, without the ids of its calls."""
    calls = [call["function"] for call in reply.calls]
    assert len({call["id"] for call in reply.calls} - {""}) == len(calls)
    return reply.message.get("reasoning"), reply.message.get("content"), calls, reply.finish_reason


def places(completion):
    """Where a cut after each number of tokens falls."""
    tokenizer = build_tokenizer()
    found = {}
    for end in range(1, len(completion)):
        begun = b"".join(map(tokenizer.token_bytes, completion[:end]))
        call = begun.rpartition(b"<tool_call>")[2] if b"<tool_call>" in begun else b"</tool_call>"
        place = "arguments" if b'"arguments"' in call and b"</tool_call>" not in call else "text" if b"</think>" in begun else "thought"
        try:
            begun.decode()
        except UnicodeDecodeError:
            place = f"character in {place}"
        found[end] = place
    return found


@pytest.mark.parametrize(
    ("how", "stream", "interval"),
    [("abort", True, 1), ("abort", True, 40), ("lost", True, 1), ("error", False, 1)],
    ids=["abort", "abort of large chunks", "lost", "error, whole reply"],
)
async def test_a_cut_at_any_token_changes_no_word(engines, figures, how, stream, interval):
    """Thought, text with characters of several bytes, two calls: the harness receives the words of the uncut reply."""
    async with (
        BreakingRelay(engines[0].url) as relay,
        proxying(relay.url, MemoryStore(), hold=LIMIT_S) as proxied,
        asyncio.timeout(LIMIT_S),
    ):
        at_once = asyncio.Semaphore(AT_ONCE)

        async def ask(session):
            async with at_once:
                harness = proxied.harness(session, tools=TOOLS, seed=11, stream_interval=interval)
                (reply,) = await harness.say("EPISODE:cut").ask(stream=stream)
            return reply

        uncut = await ask("uncut")
        where = places(uncut.ids)
        assert {"thought", "text", "arguments", "character in thought", "character in arguments"} <= set(where.values())
        replies = await asyncio.gather(*(ask(f"{how}-{end}") for end in where))
        for (end, place), reply in zip(where.items(), replies, strict=True):
            session = f"{how}-{end}"
            assert said(reply) == said(uncut), (end, place)
            (turn,) = await proxied.proxy.store.turns(session)
            tokens = await proxied.proxy.store.tokens(session, [turn.id])
            assert not invariants.audit([turn], tokens, session=session)
            assert [(piece.start, piece.end) for piece in turn.pieces] == [(0, end), (end, len(reply.ids))], (end, place)
            assert (turn.pieces[0].ended, marks_of(turn), turn.again) == (how, ["continued"], "")
            assert reply.ids == ids.unpack(tokens[turn.id].completion)
            assert (reply.ids[:end], reply.logprobs) == (uncut.ids[:end], ids.unpack_logprobs(tokens[turn.id].logprobs))
        counts = {place: list(where.values()).count(place) for place in sorted(set(where.values()))}
        figures.append(f"{how} after every token, stream={stream}, chunks of {interval}: {counts}")


def arrived(harness):
    """The ids that have arrived of a stream so far."""
    events = [event.removeprefix(b"data: ") for event in harness.arrived.split(b"\n\n")[:-1] if event.startswith(b"data: {")]
    return [token for event in events for choice in json.loads(event)["choices"] for token in choice.get("token_ids") or ()]


def chunks(harness):
    """How many chunks with ids have arrived of a stream so far."""
    return harness.arrived.count(b'"token_ids":[')


async def running(http, engine):
    """How many requests an engine samples."""
    async with http.get(f"{engine.url}/metrics") as answer:
        (line,) = [line for line in (await answer.text()).splitlines() if line.startswith("vllm:num_requests_running{")]
    return float(line.rpartition(" ")[2])


async def run(*arguments):
    result = await asyncio.to_thread(CliRunner().invoke, app, [*map(str, arguments)])
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    return result.stdout


def words(expected):
    """Thought, text and calls as the official clients return them."""
    thought, text, calls, _ = expected
    return thought, text, [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.fixture
async def fleet(engines):
    """`tokencache serve` on both engines."""
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    upstreams = [word for engine in engines for word in ("--upstream", engine.url)]
    async with aiohttp.ClientSession(timeout=timeout) as http, replica(http, *upstreams) as (_, url):

        async def both_serve():
            return [engine["serves"] for engine in (await get_json(http, f"{url}/readyz"))["engines"]] == [True, True]

        await until(both_serve)
        yield Proxied(url, engines[1].url, http, None)


@pytest.fixture
def killed(engines, servers):
    """The engine that a test kills; others need new ones."""
    yield engines[0]
    servers.stop()


async def until_all_sample(fleet, engines, calls, chats):
    """Waits until each call that has not ended has tokens."""

    async def all_run():
        counts = [await running(fleet.http, engine) for engine in engines]
        return sum(counts) + sum(call.done() for call in calls.values()) >= len(calls) and all(map(chunks, chats))

    await until(all_run)
    begun = {chat.session: chunks(chat) for chat in chats}
    await until(lambda: all(calls[chat.session].done() or chunks(chat) > begun[chat.session] + 5 for chat in chats))


async def assert_continued(fleet, engines, generation, turn, *, before, logged):
    """The turn has two pieces, the second of which continues the tokens of the first, also those that had arrived before the cut."""
    prompt, completion, logprobs = generation
    cut = turn["pieces"][0]["end"]
    ranges = [(piece["engine"], piece["start"], piece["end"], piece["ended"]) for piece in turn["pieces"]]
    assert ranges == [(engines[0].url, 0, cut, "lost"), (engines[1].url, cut, len(completion), "tool_calls")]
    assert marks_of(turn) == ["continued"]
    assert completion[: len(before)] == tuple(before)
    assert len(before) <= cut
    assert ([*prompt, *completion[:cut]], [*completion[cut:]]) in logged
    body = {"model": MODEL, "prompt": [*prompt, *completion], "max_tokens": 1, "prompt_logprobs": 0}
    scored = (await fleet.post("/v1/completions", body))["choices"][0]["prompt_logprobs"][len(prompt) :]
    assert logprobs == pytest.approx([own[str(token)]["logprob"] for own, token in zip(scored, completion, strict=True)], abs=1e-3)


async def test_an_engine_is_killed_under_64_streams(engines, killed, fleet, figures, tmp_path):
    """No harness notices more than a pause, and every token that had arrived is kept: the other engine continues from it."""
    harnesses, agents = {}, {}
    for kind, count in KINDS.items():
        for session in (f"{kind}-{n}" for n in range(count)):
            if kind in ENDED:
                agents[session] = Agent(fleet.url, session).say("EPISODE:fleet")
            else:
                harnesses[session] = fleet.harness(session, stream=kind == "chat", tools=TOOLS).say("EPISODE:fleet")
    chats = [harness for harness in harnesses.values() if harness.stream]
    expected = said(await fleet.harness("uncut", stream=True, tools=TOOLS).say("EPISODE:fleet").turn())

    for engine in engines:
        engine.set_pace(SLOW_PACE)
    calls = {session: asyncio.create_task(harness.turn()) for session, harness in harnesses.items()}
    calls |= {session: asyncio.create_task(agent.turn(session.partition("-")[0], stream=True)) for session, agent in agents.items()}
    await until_all_sample(fleet, engines, calls, chats)
    before = {chat.session: arrived(chat) for chat in chats}
    killed.kill()
    engines[1].set_pace(PACE)
    replies = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
    await asyncio.gather(*(agent.close() for agent in agents.values()))

    await run("export", "--all", "--to", tmp_path / "all.jsonl", "--proxy", fleet.url)
    await run("verify", tmp_path / "all.jsonl")
    exported = {rollout["session"]: rollout for rollout in map(json.loads, (tmp_path / "all.jsonl").read_text().splitlines())}
    logged = await GroundTruth(fleet, engines[1]).read_new()
    continued = 0
    for session, reply in replies.items():
        assert (exported[session]["complete"], exported[session]["incidents"]) == (True, []), session
        (generation,) = generations(exported[session])
        (turn,) = exported[session]["sequences"][0]["turns"]
        if session in harnesses:
            assert said(reply) == expected, session
            assert generations_of([reply]) == [generation]
        else:
            assert (reply.thought, reply.text, [(name, given) for _, name, given in reply.calls]) == words(expected), session
            assert reply.ended == ENDED[reply.dialect]
        assert turn["again"] == ""
        if turn["pieces"]:
            continued += 1
            await assert_continued(fleet, engines, generation, turn, before=before.get(session, []), logged=logged)
    assert continued > STREAMS // 8
    figures.append(f"an engine killed under {STREAMS} streams: {continued} replies continued")
    for later, chat in zip(await asyncio.gather(*(chat.turn() for chat in chats)), chats, strict=True):
        assert later.extends(chat.replies[0])
