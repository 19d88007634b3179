"""Text around a reply on a real vLLM: which ids it samples beyond the served text, and that they stand in the next prompt."""

import json

import pytest
from rig.exported import trajectory, turns
from rig.harness import TOOLS
from rig.marks import marks_of
from rig.server import MODEL

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}
PATH = "/v1/chat/completions"


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


async def events(response):
    """The chunks of a stream, as they arrive."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


async def say(proxied, session, messages, *, stream, **more):
    """The text of a reply: its content, or else its reasoning."""
    body = {"model": MODEL, "messages": messages, "stream": stream, "max_tokens": 200, **more}
    async with proxied.http.post(f"{proxied.url}/s/{session}{PATH}", json=body) as response:
        assert response.status == 200, await response.text()
        if stream:
            deltas = [chunk["choices"][0]["delta"] async for chunk in events(response) if chunk["choices"]]
        else:
            deltas = [(await response.json())["choices"][0]["message"]]
    content, reasoning = ["".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning")]
    return content or reasoning


async def exported(proxied, session, ground_truth):
    """The matches of a session, and the engine's log. Its export has each reply once, with mask 1, and no other token with mask 1.

    The engine samples a few more ids until it learns that the API server has found a stop string. They are no part of the reply.
    """
    found = await trajectory(proxied, session)
    assert found["complete"]
    log = await ground_truth.read_new_episodes()
    recorded = []
    for sequence in found["sequences"]:
        ids, mask = sequence["token_ids"], sequence["loss_mask"]
        for turn in sequence["turns"]:
            start, end = turn["completion"]
            assert all(mask[start:end])
            recorded.append((ids[:start], ids[start:end]))
        assert sum(mask) == sum(end - start for start, end in (turn["completion"] for turn in sequence["turns"]))
    whole = sorted((list(prompt), list(sampled)) for prompt, sampled in log)
    assert len(recorded) == len(whole)
    for (prompt, completion), (sent, sampled) in zip(sorted(recorded), whole, strict=True):
        assert (prompt, completion) == (sent, sampled[: len(completion)])
    return [(turn["match"], turn["reason"]) for turn in await turns(proxied, session)], log


@STREAMS
async def test_a_restored_stop_string(proxied, ground_truth, stream):
    """vLLM cuts it out of the text, and its ids stay in the completion."""
    session, messages = f"search{stream}", [user("EPISODE:search")]
    for n in range(3):
        text = await say(proxied, session, messages, stream=stream, stop=["</search>"])
        assert text.endswith(f"café {n}")
        messages += [answer(text + "</search>"), user(f"RESULT {n}")]
    matches, log = await exported(proxied, session, ground_truth)
    assert matches == [("root", ""), ("continue", ""), ("continue", "")]
    assert "café 0</search>" in await proxied.detokenize(log[1][0])


@STREAMS
async def test_words_of_the_harness_in_the_message_of_a_reply(proxied, ground_truth, stream):
    """The first reply ended by itself, the second at the stop string."""
    session, messages = f"react{stream}", [user("EPISODE:react")]
    for n in range(3):
        text = await say(proxied, session, messages, stream=stream, stop=["\nObservation:"])
        messages.append(answer(f"{text}\nObservation: result {n}"))
    matches, log = await exported(proxied, session, ground_truth)
    assert matches == [("root", ""), ("resplice", "reply-extended"), ("continue", "")]
    prompts = [await proxied.detokenize(prompt) for prompt, _ in log]
    assert 'Invisible"}\nObservation: result 0<|im_end|>\n<|im_start|>assistant\n' in prompts[1]
    assert prompts[2].endswith('café"}\nObservation: result 1<|im_end|>\n<|im_start|>assistant\n')


@STREAMS
async def test_a_continued_reply(proxied, ground_truth, stream):
    session, asked = f"essay{stream}", user("EPISODE:essay")
    first = await say(proxied, session, [asked], stream=stream, max_tokens=20)
    rest = await say(proxied, session, [asked, answer(first)], stream=stream, **CONTINUE)
    await say(proxied, session, [asked, answer(first + rest), user("next")], stream=stream)
    assert (first + rest).endswith("ten eleven.")
    matches, log = await exported(proxied, session, ground_truth)
    assert matches == [("root", ""), ("continue", ""), ("continue", "")]
    assert list(log[1][0]) == [*log[0][0], *log[0][1]]


async def test_a_stream_that_was_cut_after_a_complete_call(proxied, ground_truth, vllm_server):
    """The client leaves during the second call, executes the first, and sends it back with its result."""
    calls, body = [], {"model": MODEL, "messages": [user("EPISODE:items")], "tools": TOOLS, "stream": True}
    vllm_server.set_pace(0.02)
    async with proxied.http.post(f"{proxied.url}/s/items{PATH}", json=body) as response:
        async for chunk in events(response):
            for part in chunk["choices"][0]["delta"].get("tool_calls") or ():
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": "function", "function": {"name": part["function"]["name"], "arguments": ""}})
                calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""
            if len(calls) == 2 and calls[1]["function"]["arguments"]:
                break
        response.close()
    vllm_server.set_pace(0.0)
    history = [*body["messages"], {**answer("Look."), "tool_calls": calls[:1]}]
    history.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "a.txt"})
    await say(proxied, "items", history, stream=False, tools=TOOLS)
    (first, second), log = await turns(proxied, "items"), await ground_truth.read_new_episodes()
    assert marks_of(first) == ["aborted"]
    assert (second["match"], second["reason"]) == ("resplice", "interrupted")
    kept = second["anchors"][0]["end"]
    prompt, sampled = log[-1][0], log[0][1]
    assert list(prompt[first["prompt_tokens"] : kept]) == list(sampled[: kept - first["prompt_tokens"]])
    assert (await proxied.detokenize(prompt[:kept])).endswith('"arguments": {"command": "ls  -la"}}\n</tool_call>')
    assert (await proxied.detokenize(prompt[kept:])).startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\na.txt")
