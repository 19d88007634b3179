"""The streamed derender of the simulated engine: the deltas after any cut are those of the uncut stream."""

import aiohttp
import pytest

from tests.proxy.kit import CALLS, THOUGHT, TOOLS, assembled, user
from tokencache.testing import SimulatedEngine

REPLY = f"{THOUGHT}Let me look ☕ naïvely.\n{CALLS}"
REQUEST = {"model": "sim", "messages": [user("hello")], "tools": TOOLS}


@pytest.fixture
async def derender():
    """Send some more ids, and the state; returns the delta, the finish reason and the next state."""
    engine = SimulatedEngine(derenders=True)
    prompt = engine.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")

    async with engine.serve() as url, aiohttp.ClientSession() as http:

        async def ask(state, new, finish_reason=None):
            chunk = {"request_id": "x", "choices": [{"index": 0, "token_ids": new, "finish_reason": finish_reason}]}
            body = {"stream": True, "chat_request": REQUEST, "prompt_token_ids": prompt, "stream_state": state, "generate_chunk": chunk}
            async with http.post(url + "/v1/chat/completions/derender", json=body) as answer:
                assert answer.status == 200, await answer.text()
                found = await answer.json()
            (choice,) = found["chunk"]["choices"]
            return choice["delta"], choice["finish_reason"], found["stream_state"]

        yield engine, ask


def message(deltas):
    found = assembled([{"choices": [{"index": 0, "delta": delta}]} for delta in deltas])
    return found["reasoning"], found["content"], [call["function"] for call in found["tool_calls"]]


async def test_every_cut_of_a_reply(derender):
    """Within the thought, a character, the text, a name and arguments: with the state, nothing is repeated or missing."""
    engine, ask = derender
    tokens = engine.tokenizer.encode(REPLY)
    whole, reason, _ = await ask(None, tokens, "stop")
    assert (message([whole])[0].strip(), len(message([whole])[2]), reason) == ("I look first — naïve café ☕.", 2, "tool_calls")
    for cut in range(1, len(tokens)):
        first, none, state = await ask(None, tokens[:cut])
        rest, reason, after = await ask(state, tokens[cut:], "stop")
        assert message([first, rest]) == message([whole]), cut
        assert (none, reason) == (None, "tool_calls")
        assert [delta.get("role") for delta in (first, rest)] == ["assistant", None]
        assert (after["output_token_ids"], sum(after["output_chunk_lens"])) == (tokens, len(tokens))
        assert len(set(after["last_tool_call_ids"])) == 2


async def test_without_the_state_words_are_wrong(derender):
    """What the test above would notice."""
    engine, ask = derender
    tokens = engine.tokenizer.encode(REPLY)
    first, _, _ = await ask(None, tokens[:20])
    rest, _, _ = await ask(None, tokens[20:], "stop")
    whole, _, _ = await ask(None, tokens, "stop")
    assert message([first, rest]) != message([whole])
