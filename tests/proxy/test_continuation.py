"""Replies that an engine breaks off are continued: exact tokens, one reply for the harness, and its words are those of its tokens."""

import asyncio
import json
import random

import pytest

from tests.proxy.kit import CALLS, CHAT, EPISODES, HEADER, THOUGHT, TOOLS, assembled, proxied, user
from tests.proxy.test_several_engines import Fleet
from tests.proxy.test_several_engines import serving as all_serve
from tests.support.waiting import PATIENCE, until
from tokencache.core import ids
from tokencache.proxy import continuation
from tokencache.testing import Fault, SimulatedEngine, completion, derender
from tokencache.testing.generation import generate
from tokencache.testing.parser import StreamParser

ALL = {**EPISODES, "text": [f"{THOUGHT}Well, that is all."], "all": [f"{THOUGHT}Let me look ☕ naïvely.\n{CALLS}"]}
ASK = {"messages": [user("EPISODE:all")], "tools": TOOLS}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("tokencache.proxy.dispatch.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("tokencache.proxy.dispatch.LONGEST_PAUSE", 0.02)


@pytest.fixture
async def rig():
    async with proxied(SimulatedEngine(episodes=ALL, seed=7, derenders=True), hold=PATIENCE) as found:
        yield found


def said(answer, *, stream):
    message = assembled(answer) if stream else answer["choices"][0]["message"]
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
    return (message.get("reasoning") or "").strip(), (message.get("content") or "").strip(), calls


EXPECTED = (
    "I look first — naïve café ☕.",
    "Let me look ☕ naïvely.",
    [("bash", {"timeout": 10.0, "cmd": "ls  -la\n"}), ("bash", {"cmd": "cat ü.txt"})],
)


async def recorded(rig, session="s"):
    """The only turn of a session, with its ids and log probabilities."""
    (turn,) = await rig.store.turns(session)
    (tokens,) = (await rig.store.tokens(session, [turn.id])).values()
    return turn, ids.unpack(tokens.delta), ids.unpack(tokens.completion), ids.unpack_logprobs(tokens.logprobs)


def problems(turn, prompt, completion, logprobs, sampled):
    """Compare a turn with what the engines sampled for it, in order: each part begins where the one before ended."""
    found, at = [], 0
    parts = [(piece.start, piece.end) for piece in turn.pieces] or [(0, len(completion))]
    if len(parts) != len(sampled):
        found.append(f"{len(parts)} parts, {len(sampled)} generations")
    for (start, end), entry in zip(parts, sampled, strict=False):
        if start != at:
            found.append(f"a part begins at {start}, not {at}")
        if entry.prompt_ids != prompt + completion[:start]:
            found.append(f"the part at {start} has another prompt")
        if entry.completion_ids[: end - start] != completion[start:end] or entry.logprobs[: end - start] != logprobs[start:end]:
            found.append(f"the part at {start} has other tokens")
        at = end
    if at != len(completion):
        found.append(f"{len(completion)} tokens, {at} in parts")
    return found


@pytest.mark.parametrize(
    ("chunk", "stream"),
    [
        pytest.param(1, True, id="token by token-stream"),
        pytest.param(30, False, id="the engine lags behind-whole"),
        pytest.param(1, False, id="token by token-whole", marks=pytest.mark.whole),
        pytest.param(30, True, id="the engine lags behind-stream", marks=pytest.mark.whole),
    ],
)
async def test_a_reply_cut_at_any_token_is_one_reply(rig, stream, chunk):
    """Its words are those of an uncut one, also if it is cut within a character, a tag, a name or the arguments of a call.

    If the engine's server lags behind, the chunk with which it ends the reply has many tokens: a thought and a call, or all there are.
    """
    rig.engine.chunk_tokens = chunk
    await rig.post("uncut", **ASK, stream=stream)
    turn, _, completion, _ = await recorded(rig, "uncut")
    assert not turn.pieces
    for after in range(1, len(completion)):
        session = f"s{after}"
        rig.engine.faults.append(Fault.abort(after))
        status, answer = await rig.post(session, **ASK, stream=stream)
        turn, *tokens = await recorded(rig, session)
        assert (status, said(answer, stream=stream)) == (200, EXPECTED), after
        assert not problems(turn, *tokens, rig.ground_truth(session)), after
        if not turn.pieces:  # each reply has other ids, and this one has no more
            assert after > 60
            break
        assert ([piece.ended for piece in turn.pieces], turn.finish_reason) == (["abort", turn.pieces[1].ended], "tool_calls")
        assert list(turn.marks) == ["continued"]
        assert not (await rig.info(session))["incidents"], after
        if stream:
            ends = [chunk["choices"][0]["finish_reason"] for chunk in answer if chunk["choices"]]
            roles = [chunk["choices"][0]["delta"].get("role") for chunk in answer if chunk["choices"]]
            assert ([end for end in ends if end], roles.count("assistant")) == (["tool_calls"], 1)


class LeavesTheMark(StreamParser):
    """As `deepseek_r1`: the mark that begins a thought stays in a thought that arrives with it."""

    def feed(self, text, *, finished=False):
        delta = super().feed(text, finished=finished)
        mark = "<think>" if text.startswith("<think>") and text != "<think>" else ""
        return {**delta, "reasoning": mark + delta["reasoning"]} if delta and mark else delta


@pytest.mark.parametrize("lags", ["the stream", "derender", "both"])
async def test_a_mark_that_a_parser_leaves_in_a_thought_does_not_end_the_words(rig, monkeypatch, lags):
    """A server that lags behind parses several tokens at once, as derender does with all of them; the client's were parsed otherwise."""
    if lags != "derender":
        monkeypatch.setattr(completion, "StreamParser", LeavesTheMark)
        monkeypatch.setattr(completion, "generate", lambda *reply, **more: generate(*reply, **{**more, "first": 2}))
    if lags != "the stream":
        monkeypatch.setattr(derender, "StreamParser", LeavesTheMark)
    rig.engine.faults.append(Fault.abort(9))
    answer = (await rig.post("s", stream=True, **ASK))[1]
    reasoning, *others = said(answer, stream=True)
    assert (reasoning.removeprefix("<think>").strip(), *others) == EXPECTED
    assert ([turn["marks"] for turn in await rig.turns()], (await rig.info())["incidents"]) == ([["continued"]], [])


async def test_words_that_are_due_with_the_last_token_end_before_it(rig, monkeypatch):
    """On a busy machine, words are due when the id that ends the message arrives: it is no word."""
    monkeypatch.setattr(continuation, "WORDS_SECONDS", 0)
    rig.engine.faults.append(Fault.abort(2))
    _, answer = await rig.post("s", messages=[user("EPISODE:text")], stream=True)
    turn, *_ = await recorded(rig)
    assert (assembled(answer)["content"].strip(), len(turn.pieces)) == ("Well, that is all.", 2)


@pytest.mark.whole
@STREAMS
async def test_random_cuts(rig, stream):
    """Aborts, errors and lost connections, several in a reply: nothing is lost, nothing is there twice."""
    chance = random.Random(17)
    for n in range(30):
        session = f"s{n}"
        faults = [
            chance.choice([Fault.abort, Fault.cut, Fault.close, Fault.error_event])(chance.randint(2, 25))
            for _ in range(chance.randint(1, 4))
        ]
        rig.engine.faults.extend(faults)
        rig.engine.chunk_tokens = chance.choice([1, 3])
        status, answer = await rig.post(session, **ASK, stream=stream)
        rig.engine.faults.clear()
        turn, *tokens = await recorded(rig, session)
        assert (status, said(answer, stream=stream)) == (200, EXPECTED), faults
        assert not problems(turn, *tokens, rig.ground_truth(session)), faults
        assert set(turn.marks) <= {"continued"}


async def test_the_checker_can_fail(rig):
    rig.engine.faults.append(Fault.abort(9))
    await rig.post("s", **ASK, stream=True)
    turn, prompt, completion, logprobs = await recorded(rig)
    sampled = rig.ground_truth()
    assert not problems(turn, prompt, completion, logprobs, sampled)
    assert problems(turn, prompt, [*completion[:9], *completion[10:]], logprobs, sampled)
    assert problems(turn, prompt, completion, [0.0, *logprobs[1:]], sampled)
    assert problems(turn, prompt, completion, logprobs, sampled[:1])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"model": "sim", "max_tokens": 999, "messages": ASK["messages"]}),
        ("/v1/responses", {"model": "sim", "input": "EPISODE:all"}),
        ("/v1beta/models/sim:streamGenerateContent?alt=sse", {"contents": [{"role": "user", "parts": [{"text": "EPISODE:all"}]}]}),
    ],
    ids=["messages", "responses", "gemini"],
)
async def test_dialects(rig, path, body):
    """A cut stream has the same text as an uncut one."""
    texts = []
    for session, fault, chunk in (("uncut", None, 1), ("cut", Fault.abort(12), 1), ("large", Fault.abort(90), 100)):
        rig.engine.faults.append(fault)
        rig.engine.chunk_tokens = chunk
        async with rig.http.post(
            rig.url + path, json=body | ({} if "alt" in path else {"stream": True}), headers={HEADER: session}
        ) as answer:
            assert answer.status == 200
            lines = [line.partition("data: ")[2] for line in (await answer.text()).replace("\r", "").split("\n\n")]
        found = [json.loads(line) for line in lines if line.startswith("{")]
        parts = [event.get("delta") if isinstance(event.get("delta"), (str, dict)) else event for event in found]
        texts.append("".join(_texts(part) for part in parts if part is not None))
    assert texts[0] == texts[1] == texts[2] != ""
    for session in ("cut", "large"):
        turn, *tokens = await recorded(rig, session)
        assert not problems(turn, *tokens, rig.ground_truth(session))
        assert len(turn.pieces) == 2


def _texts(part):
    if isinstance(part, str):
        return part
    if "candidates" in part:
        return "".join(one.get("text", "") for one in part["candidates"][0]["content"].get("parts", ()))
    return "".join(part.get(name, "") for name in ("text", "thinking", "partial_json"))


async def test_limits_are_reduced_and_the_seed_changes(rig):
    rig.engine.faults.extend([Fault.abort(5), Fault.abort(4)])
    _, answer = await rig.post("s", **ASK, stream=True, max_tokens=12, min_tokens=3, seed=11)
    sent = [(body["max_tokens"], body["min_tokens"]) for body in rig.engine.requests[-3:]]
    assert sent == [(12, 3), (7, 0), (3, 0)]
    assert len({body["seed"] for body in rig.engine.requests[-3:]}) == 3
    assert answer[-1]["choices"][0]["finish_reason"] == "length"
    turn, *tokens = await recorded(rig)
    assert (turn.completion_tokens, problems(turn, *tokens, rig.ground_truth())) == (12, [])


@STREAMS
async def test_what_a_limit_has_used_up_ends(rig, stream):
    """The engine has sampled all that it may before it aborts."""
    rig.engine.faults.append(Fault.abort(4))
    _, answer = await rig.post("s", **ASK, stream=stream, max_tokens=5)
    turn, *_ = await recorded(rig)
    assert (turn.completion_tokens, turn.finish_reason) == (5, "length")
    assert (answer[-1] if stream else answer)["choices"][0]["finish_reason"] == "length"


async def test_usage_is_that_of_the_whole_reply(rig):
    for stream in (False, True):
        rig.engine.faults.append(Fault.abort(9))
        options = {"stream_options": {"include_usage": True}} if stream else {}
        _, answer = await rig.post(f"s{stream}", **ASK, stream=stream, **options)
        usage = (answer[-1] if stream else answer)["usage"]
        turn, *_ = await recorded(rig, f"s{stream}")
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (turn.prompt_tokens, turn.completion_tokens)
        assert usage["total_tokens"] == turn.prompt_tokens + turn.completion_tokens


@pytest.mark.parametrize("more", [{"presence_penalty": 0.5}, {"stop": ["zzz"]}, {"bad_words": ["a b"]}], ids=str)
async def test_an_unsafe_request_is_sampled_again(rig, more):
    """The turn of the first attempt says why."""
    rig.engine.faults.append(Fault.abort(9))
    status, answer = await rig.post("s", **ASK, **more)
    assert (status, said(answer, stream=False)) == (200, EXPECTED)
    first, second = await rig.store.turns("s")
    assert (first.completion_tokens, "engine-aborted" in first.marks, second.pieces) == (9, True, ())
    assert next(iter(more)) in first.again
    assert not second.again


async def test_pass_gives_the_harness_what_the_engine_sent():
    async with proxied(SimulatedEngine(episodes=ALL, seed=7, derenders=True), hold=PATIENCE, aborted="pass") as rig:
        rig.engine.faults.append(Fault.abort(9))
        _, answer = await rig.post("s", **ASK)
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert (await recorded(rig))[0].completion_tokens == 9


@STREAMS
async def test_a_continuation_that_finds_no_engine_ends_as_the_engine_ended_it(rig, stream):
    rig.engine.faults.extend([Fault.abort(9), *[Fault.answer(400, "{}")] * 2])
    _, answer = await rig.post("s", **ASK, stream=stream)
    first, *_ = await rig.store.turns("s")
    assert first.again == "the engine answered 400: {}"
    assert (first.completion_tokens, "engine-aborted" in first.marks) == (9, True)
    if stream:
        assert answer[-1]["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("retry", [{}, {"X-Stainless-Retry-Count": "1"}], ids=["first", "marked retry"])
async def test_a_whole_reply_that_broke_off_and_cannot_be_continued_is_sampled_again(rig, retry):
    """It has no finish reason. Its turn is no whole reply: neither does a retry get it, nor is the new sample a second one."""
    rig.engine.faults.extend([Fault.cut(after=9), Fault.answer(400, "{}")])
    async with rig.http.post(rig.url + CHAT, json={"model": "sim", **ASK}, headers={HEADER: "s", **retry}) as answer:
        assert said(await answer.json(), stream=False) == EXPECTED
    cut, whole = await rig.store.turns("s")
    assert (cut.marks, cut.finish_reason, whole.marks, whole.finish_reason) == (("engine-aborted",), "abort", (), "tool_calls")


async def test_derender_fails_at_the_end(rig):
    """The tokens are recorded; the stream ends with an error."""
    derender = CHAT + "/derender"
    rig.engine.faults.extend([Fault.abort(9), *[Fault.answer(500, "{}", path=derender)] * 20])
    async with rig.http.post(rig.url + CHAT, json={"model": "sim", **ASK, "stream": True}, headers={HEADER: "s"}) as answer:
        try:
            text = await answer.text()
        except Exception:  # noqa: BLE001 - the connection may be closed before its end
            text = ""
    assert '"finish_reason":"tool_calls"' not in text
    turn, *tokens = await recorded(rig)
    assert not problems(turn, *tokens, rig.ground_truth())
    assert "upstream-broke" in turn.marks


async def test_a_client_that_leaves_while_its_reply_is_continued(rig, monkeypatch):
    """Every token that arrived is recorded, also those whose words were not asked for yet."""
    monkeypatch.setattr(continuation, "WORDS_SECONDS", 60)
    rig.engine.faults.append(Fault.abort(9))
    rig.engine.token_delay = 0.01
    async with rig.http.post(rig.url + CHAT, json={"model": "sim", **ASK, "stream": True}, headers={HEADER: "s"}) as answer:
        await answer.content.readany()
        await rig.engine.until(lambda: len(rig.ground_truth()) == 2 and len(rig.ground_truth()[1].completion_ids) > 10)

    async def closed():
        return not (await rig.info())["open_calls"]

    await until(closed)
    turn, *tokens = await recorded(rig)
    assert not problems(turn, *tokens, rig.ground_truth())
    assert (turn.completion_tokens > 18, "aborted" in turn.marks, "continued" in turn.marks) == (True, True, True)


async def test_without_derender_nothing_changes():
    async with proxied(SimulatedEngine(episodes=ALL, seed=7), hold=PATIENCE) as rig:
        rig.engine.faults.append(Fault.abort(9))
        _, answer = await rig.post("s", **ASK)
        assert said(answer, stream=False) == EXPECTED
        first, second = await rig.store.turns("s")
        assert (first.pieces, second.pieces, rig.engine.requests[-1].get("stream")) == ((), (), None)


async def test_a_stream_has_the_ids_that_its_harness_requested(rig):
    rig.engine.faults.append(Fault.abort(9))
    _, answer = await rig.post("s", **ASK, stream=True, return_token_ids=True, logprobs=True)
    *_, completion, logprobs = await recorded(rig)
    choices = [chunk["choices"][0] for chunk in answer if chunk["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids") or ()] == completion
    values = [item["logprob"] for choice in choices for item in (choice["logprobs"] or {}).get("content", ())]
    assert values == logprobs
    assert len({chunk["id"] for chunk in answer}) == 1


# Several engines


@pytest.fixture
async def two():
    """Two engines of one kind; the rig's engine has the log of both."""
    fleet = Fleet([SimulatedEngine(episodes=ALL, seed=seed, derenders=True, token_delay=0.002) for seed in (7, 8)])
    async with fleet, proxied(upstream=",".join(fleet.urls), hold=PATIENCE) as rig:
        await all_serve(rig, 2)
        rig.engine = fleet
        yield rig


@pytest.mark.whole
async def test_an_engine_dies_under_64_streams(two):
    """No harness notices more than a pause, and every token that arrived is kept."""
    fleet, sessions = two.engine, [f"s{n}" for n in range(64)]
    streams = [asyncio.create_task(two.post(session, **ASK, stream=session != "s0")) for session in sessions]

    async def all_sample():
        return sum(len(entry.completion_ids) > 5 for entry in fleet.ground_truth) >= len(sessions) - 2

    await until(all_sample, "every stream samples")
    homes = {session: fleet.home(session) for session in sessions}
    await fleet.stop(0)
    continued = 0
    for session, (status, answer) in zip(sessions, await asyncio.gather(*streams), strict=True):
        assert (status, said(answer, stream=session != "s0")) == (200, EXPECTED)
        turn, *tokens = await recorded(two, session)
        sampled = [entry for place in (homes[session], 1 - homes[session]) for entry in fleet.engines[place].ground_truth]
        own = [entry for entry in sampled if entry.session == session]
        assert not problems(turn, *tokens, own), session
        assert set(turn.marks) <= {"continued"}
        assert [piece.engine for piece in turn.pieces] == ([fleet.urls[0], fleet.urls[1]] if turn.pieces else [])
        continued += bool(turn.pieces)
    assert continued > 10


# Lengths


class _Sampler:
    """A model whose replies have lengths of a heavy-tailed distribution; it continues a reply like any text."""

    def __init__(self, tokenizer, seed):
        self.tokenizer, self.seed, self.eos = tokenizer, seed, tokenizer.stop_id
        self._rng = random.Random(seed)
        self._word = tokenizer.encode(" and")[0]

    def logprobs_seed(self, prompt_ids, call, index):
        return f"{call}-{index}"

    def reply(self, request, prompt_ids, call, index, choice=()):
        done = 0
        while prompt_ids[len(prompt_ids) - 1 - done] == self._word:
            done += 1
        while True:
            if self._rng.random() < 1 / (4 + done / 2):  # the hazard falls with the length
                yield self.tokenizer.stop_id
                return
            done += 1
            yield self._word


async def _lengths(policy, abort_chance, replies):
    """Lengths of replies to a harness, where each token may be the last before an abort."""
    engine = SimulatedEngine(seed=7, derenders=True)
    engine.replies = _Sampler(engine.tokenizer, 5)
    async with proxied(engine, hold=PATIENCE, aborted=policy) as rig:
        chance = random.Random(3)
        engine.choose_fault = lambda route, _body: (
            Fault.abort(int(chance.expovariate(abort_chance))) if route == CHAT and abort_chance else None
        )
        found = []
        for n in range(replies):
            body = {"messages": [user(f"{n}")], "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 300}
            _, answer = await rig.post(f"s{n}", **body)
            assert answer["choices"][0]["finish_reason"] in {"stop", "length", "abort"}
            (turn,) = [turn for turn in await rig.store.turns(f"s{n}") if "engine-aborted" not in turn.marks or policy == "pass"] or [None]
            if turn is not None:
                found.append(turn.completion_tokens)
        return found


def _distance(one, other):
    """The two-sample Kolmogorov-Smirnov statistic."""
    values = sorted({*one, *other})
    return max(abs(sum(x <= v for x in one) / len(one) - sum(x <= v for x in other) / len(other)) for v in values)


def _alike(one, other):
    """Whether two samples may be of one distribution (1 %)."""
    return _distance(one, other) < 1.63 * (1 / len(one) + 1 / len(other)) ** 0.5


@pytest.mark.whole  # 500 replies take 10 CPU seconds, and 300 do not show the difference; each cut is tested above
@pytest.mark.parametrize("replies", [1000])
async def test_lengths_of_aborted_replies(replies):
    """Continued replies are as long as undisturbed ones; replies that are sampled again are shorter."""
    undisturbed, continued = await _lengths("continue", 0, replies), await _lengths("continue", 0.1, replies)
    assert len(undisturbed) == replies
    assert len(continued) >= 0.99 * replies  # the rest was cut too often
    assert _alike(undisturbed, continued)
    again = await _lengths("again", 0.1, replies)
    assert not _alike(undisturbed, again)
    assert sum(again) / len(again) < 0.9 * sum(undisturbed) / len(undisturbed)
