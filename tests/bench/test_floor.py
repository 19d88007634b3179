"""The floor in front of the mock engine: the ids of a history reach the engine, the echo does not reach the client."""

import json
import re

import pytest

from bench import mock
from bench.floor import _MOST, STOP, Floor, kept_sessions
from bench.talk import Talk

IDS = '"prompt_token_ids":['


@pytest.fixture(params=[False, True], ids=["engine's tail", "local"])
async def ask(request, serve):
    """Calls the floor with a body, and the session, if any."""
    floor = await serve(Floor, local=request.param)

    async def ask(*words):
        status, answer = await floor.ask(*words)
        assert status == 200
        return answer.decode()

    ask.local = request.param
    return ask


def spoken_ids(text):
    """The model's text, and the ids that it sampled."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] or [json.loads(text)]
    choices = [choice for event in events for choice in event["choices"]]
    words = [(choice.get("delta") or choice["message"]).get("content") or "" for choice in choices]
    return "".join(words), [token for choice in choices for token in choice.get("token_ids") or ()]


@pytest.mark.parametrize("stream", [{}, {"stream": True, "mock_pace_ms": 1}], ids=["whole", "streamed"])
async def test_ids_go_with_the_history_and_the_echo_is_cut_out(ask, asked, stream):
    talk = Talk("floor", size=3000, messages=4, mock_tokens=8, **stream)
    history = list(json.loads(b"[%s]" % mock.render(talk.entries, generation=True)))
    for turn in range(3):
        text = await ask(talk.body())
        assert re.search(re.escape(IDS) + r"\d", text) is None
        content, sampled = spoken_ids(text)
        assert len(sampled) == 8
        if turn:
            sent = json.loads(asked[-1][1])["kv_transfer_params"]["prompt_token_ids"]
            assert sent[: len(history)] == history
            if not ask.local:
                tail = mock.render(talk.entries[-2:], generation=True)
                assert sent[len(history) :] == json.loads(b"[%s]" % tail[tail.index(STOP) + len(STOP) :])
            history = sent
        history = history + sampled
        talk.add_turn(content, 100)
    paths = [path for path, _ in asked]
    assert paths.count(b"/v1/chat/completions") == 3
    assert paths.count(b"/tokenize") == (0 if ask.local else 2)


async def test_sessions_do_not_mix(ask, asked):
    one, other = (Talk(name, size=1000, messages=2, mock_tokens=4) for name in ("one", "other"))
    await ask(one.body(), "one")
    await ask(other.body(), "other")
    assert b"kv_transfer_params" not in asked[-1][1]


async def test_without_a_session_it_is_the_bare_relay(ask, asked):
    body = Talk("bare", size=1000, messages=2, mock_tokens=4).body()
    assert '"prompt_token_ids":null' in await ask(body, "")
    assert asked == [(b"/v1/chat/completions", body)]


def test_old_sessions_are_evicted():
    kept = kept_sessions()
    for name in "abc":
        kept[name] = [bytes(_MOST // 2)]
    assert [*kept] == ["b", "c"]


def test_a_tail_begins_after_the_mocks_end_of_turn():
    assert b"%d," % mock.END == STOP
