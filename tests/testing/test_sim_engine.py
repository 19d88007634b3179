"""The simulated engine through the official SDK, over HTTP, and in its ground truth."""

import asyncio
import json
import math
import struct
import subprocess
import sys

import aiohttp
import openai
import pytest

from tokencache.testing import SimulatedEngine

TOOL = {
    "type": "function",
    "function": {"name": "bash", "description": "Run", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
}
EPISODES = {
    "demo": [
        (
            "<think>\nFirst I look — naïve café ☕.\n</think>\n\nLet me look.\n"
            '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls  -la"}}\n</tool_call>'
        ),
        "<think>\nDone.\n</think>\n\nAll done ☕, nothing more.",
    ],
    "quiet": ["Only text."],
}
ASK = {"model": "sim", "messages": [{"role": "user", "content": "EPISODE:demo"}], "tools": [TOOL]}
EVERYTHING = {"return_token_ids": True, "logprobs": True, "top_logprobs": 2}


@pytest.fixture
async def engine():
    return SimulatedEngine(episodes=EPISODES, seed=7)


@pytest.fixture
async def url(engine):
    async with engine.serve() as base:
        yield base


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def sdk(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def ask(http, url, **body):
    async with http.post(f"{url}/v1/chat/completions", json={**ASK, **body}) as response:
        return response.status, await response.json()


async def events(http, url, **body):
    """The `data:` payloads of a stream, as text."""
    async with http.post(f"{url}/v1/chat/completions", json={**ASK, **body, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = await response.text()
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


async def chunks(http, url, **body):
    lines = await events(http, url, **body)
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_the_sdk_reads_a_whole_reply(sdk, engine):
    reply = await sdk.chat.completions.create(**ASK, extra_body={"return_token_ids": True})
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "\n\nLet me look.\n"
    assert choice.message.model_extra["reasoning"] == "\nFirst I look — naïve café ☕.\n"
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [("bash", '{"cmd": "ls  -la"}')]
    entry = engine.ground_truth[0]
    assert choice.model_extra["token_ids"] == entry.completion_ids
    assert reply.model_extra["prompt_token_ids"] == entry.prompt_ids
    assert reply.usage.completion_tokens == len(entry.completion_ids)
    assert entry.completion_ids[-1] == engine.tokenizer.stop_id


@pytest.mark.parametrize("chunk_tokens", [1, 3, 50])
async def test_a_stream_adds_up_to_the_whole_reply(sdk, engine, chunk_tokens):
    whole = (await sdk.chat.completions.create(**ASK)).choices[0]
    engine.chunk_tokens = chunk_tokens
    reasoning = content = arguments = ""
    names, ids, reason, usage = [], [], None, None
    stream = await sdk.chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += choice.delta.model_extra.get("reasoning") or ""
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                names.extend([call.function.name] if call.function.name else [])
                arguments += call.function.arguments or ""
            ids.extend(choice.model_extra.get("token_ids") or [])
            reason = choice.finish_reason or reason
    assert (reasoning, content) == (whole.message.model_extra["reasoning"], whole.message.content)
    assert (names, arguments) == (["bash"], whole.message.tool_calls[0].function.arguments)
    assert reason == whole.finish_reason
    assert ids == engine.ground_truth[1].completion_ids
    assert usage.completion_tokens == len(ids)


async def test_the_same_request_gives_the_same_text_in_other_ids(http, url, engine):
    for _ in range(2):
        await ask(http, url)
    first, second = engine.ground_truth
    assert first.prompt_ids == second.prompt_ids
    assert first.completion_ids != second.completion_ids
    decoded = {engine.tokenizer.decode(entry.completion_ids) for entry in engine.ground_truth}
    assert decoded == {EPISODES["demo"][0] + "<|im_end|>"}
    assert engine.tokenizer.encode(decoded.pop()) not in (first.completion_ids, second.completion_ids)


async def test_engines_with_the_same_seed_sample_the_same_ids(http, url, engine):
    await ask(http, url, messages=[{"role": "user", "content": "free"}])
    twin = SimulatedEngine(episodes=EPISODES, seed=7)
    async with twin.serve() as twin_url:
        await ask(http, twin_url, messages=[{"role": "user", "content": "free"}])
    assert twin.ground_truth[0].completion_ids == engine.ground_truth[0].completion_ids
    assert twin.ground_truth[0].logprobs == engine.ground_truth[0].logprobs


async def test_supplied_ids_are_the_prompt_and_the_messages_do_not_matter(http, url, engine):
    prompt = engine.tokenizer.encode(
        "<|im_start|>user\nEPISODE:demo<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt.append(0)
    status, reply = await ask(
        http, url, messages=[{"role": "user", "content": "something else"}], kv_transfer_params={"prompt_token_ids": prompt}, **EVERYTHING
    )
    assert status == 200
    assert reply["prompt_token_ids"] == prompt == engine.ground_truth[0].prompt_ids
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["choices"][0]["message"]["content"] == "\n\nAll done ☕, nothing more."
    assert engine.ground_truth[0].ids_supplied


async def test_an_old_engine_silently_ignores_supplied_ids(http, url, engine):
    engine.honours_ids = False
    status, reply = await ask(http, url, kv_transfer_params={"prompt_token_ids": [1, 2, 3]}, return_token_ids=True)
    assert status == 200
    assert reply["prompt_token_ids"] != [1, 2, 3]
    assert not engine.ground_truth[0].ids_supplied


@pytest.mark.parametrize("ids", [[], "abc", [-1], [True], [1.5], ["a"], [10**9], {"a": 1}])
async def test_malformed_ids_are_refused(http, url, engine, ids):
    status, reply = await ask(http, url, kv_transfer_params={"prompt_token_ids": ids}, stream=True)
    assert status == 400
    assert reply["error"]["param"] == "kv_transfer_params.prompt_token_ids"
    assert not engine.ground_truth


async def test_tokenize_is_what_a_plain_request_is_rendered_to(http, url, engine):
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"cmd":"é"}'}}
    history = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "EPISODE:demo"}, {"type": "text", "text": "go"}]},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "out"},
    ]  # fmt: skip
    _, reply = await ask(http, url, messages=history, return_token_ids=True)
    async with http.post(f"{url}/tokenize", json={"messages": history, "tools": [TOOL], "return_token_strs": True}) as response:
        rendered = await response.json()
    assert rendered["tokens"] == reply["prompt_token_ids"]
    assert list(rendered) == ["count", "max_model_len", "tokens", "token_strs"]
    assert rendered["count"] == len(rendered["tokens"]) == len(rendered["token_strs"])
    text = engine.tokenizer.decode(rendered["tokens"])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert "user\nEPISODE:demo\ngo<|im_end|>" in text
    assert '<think>\nr\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {"cmd": "é"}}\n</tool_call>' in text
    async with http.post(f"{url}/detokenize", json={"tokens": rendered["tokens"]}) as response:
        assert await response.json() == {"prompt": text}


async def test_tokenize_continues_a_final_message(http, url, engine):
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so "}]}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    async with http.post(f"{url}/tokenize", json={**body, **options}) as response:
        tokens = (await response.json())["tokens"]
    assert engine.tokenizer.decode(tokens).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nso ")
    async with http.post(f"{url}/tokenize", json={"prompt": "hi <|im_end|>"}) as response:
        assert (await response.json())["tokens"] == engine.tokenizer.encode("hi <|im_end|>")


async def test_a_made_up_reply_goes_on_where_it_was_cut(http, url, engine):
    """Also one that begins with an empty thinking block, in the ids in which the template writes such a block."""
    block = engine.tokenizer.encode("<think>\n\n</think>\n\n")
    alike = 0
    for n in range(40):
        asked = {"messages": [{"role": "user", "content": f"Question {n}?"}], "return_token_ids": True}
        _, answer = await ask(http, url, **asked)
        prompt, reply = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        alike += reply[: len(block)] == block
        begun = reply[: len(reply) * 2 // 3]
        _, answer = await ask(http, url, **asked, kv_transfer_params={"prompt_token_ids": prompt + begun})
        assert engine.tokenizer.decode(begun + answer["choices"][0]["token_ids"]) == engine.tokenizer.decode(reply)
    assert alike


@pytest.mark.parametrize("stream", [False, True])
async def test_the_ground_truth_equals_what_was_returned(http, url, engine, stream):
    if stream:
        parts = [chunk["choices"][0] for chunk in await chunks(http, url, **EVERYTHING)]
        ids = [token_id for part in parts for token_id in part.get("token_ids", [])]
        told = [item for part in parts for item in (part["logprobs"] or {"content": []})["content"]]
    else:
        _, reply = await ask(http, url, **EVERYTHING)
        ids, told = reply["choices"][0]["token_ids"], reply["choices"][0]["logprobs"]["content"]
    entry = engine.ground_truth[0]
    assert (ids, [item["logprob"] for item in told]) == (entry.completion_ids, entry.logprobs)
    assert "".join(item["token"] for item in told) == engine.tokenizer.decode(entry.completion_ids)
    assert all(-5 < value < 0 and struct.unpack("f", struct.pack("f", value))[0] == value for value in entry.logprobs)
    assert all(len(item["top_logprobs"]) == 2 and math.isclose(item["top_logprobs"][0]["logprob"], item["logprob"]) for item in told)
    assert (entry.stream, entry.aborted, entry.finish_reason) == (stream, False, "tool_calls")


async def test_each_chunk_has_its_own_ids_even_without_text(http, url):
    role, *rest = await chunks(http, url, return_token_ids=True)
    assert list(role) == ["id", "object", "created", "model", "choices", "prompt_token_ids", "prompt_text"]
    assert "token_ids" not in role["choices"][0]
    assert all(len(chunk["choices"][0]["token_ids"]) == 1 for chunk in rest)
    assert any(chunk["choices"][0]["delta"] == {} for chunk in rest)
    assert list(rest[-1]["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"]
    assert list(rest[-1])[-1] == "system_fingerprint"


async def test_hidden_reasoning_hides_ids_and_logprobs(http, url):
    _, reply = await ask(http, url, include_reasoning=False, **EVERYTHING)
    choice = reply["choices"][0]
    assert (choice["message"]["reasoning"], choice["token_ids"], choice["logprobs"]) == (None, None, None)
    assert choice["message"]["content"] == "\n\nLet me look.\n"
    for chunk in await chunks(http, url, include_reasoning=False, **EVERYTHING):
        assert chunk["choices"][0]["delta"].get("reasoning") is None
        assert chunk["choices"][0].get("token_ids") is None


@pytest.mark.parametrize("limit", [{"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 100, "max_completion_tokens": 5}])
async def test_a_reply_stops_at_its_length(http, url, engine, limit):
    _, reply = await ask(http, url, return_token_ids=True, **limit)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert len(reply["choices"][0]["token_ids"]) == 5
    assert engine.tokenizer.stop_id not in reply["choices"][0]["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_the_text_but_not_the_ids(http, url, engine, stream):
    ask_it = {
        "messages": [{"role": "user", "content": "EPISODE:quiet"}],
        "stop": ["text", "zzz"],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    if stream:
        parts = [chunk["choices"][0] for chunk in await chunks(http, url, **ask_it)]
        content, last = "".join(part["delta"].get("content") or "" for part in parts), parts[-1]
    else:
        _, reply = await ask(http, url, **ask_it)
        last = reply["choices"][0]
        content = last["message"]["content"]
    assert (content, last["finish_reason"], last["stop_reason"]) == ("Only ", "stop", "text")
    assert engine.tokenizer.decode(engine.ground_truth[0].completion_ids).startswith("Only text")


async def test_stop_token_ids_and_allowed_token_ids(http, url, engine):
    think = engine.tokenizer.id_of("</think>")
    _, reply = await ask(http, url, stop_token_ids=[think], return_token_ids=True)
    assert reply["choices"][0]["stop_reason"] == think == reply["choices"][0]["token_ids"][-1]
    _, reply = await ask(http, url, allowed_token_ids=[300, 301], max_tokens=2, return_token_ids=True)
    assert set(reply["choices"][0]["token_ids"]) <= {300, 301}
    assert reply["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_each_with_its_own_ids(http, url, engine, stream):
    if stream:
        parts = [chunk["choices"][0] for chunk in await chunks(http, url, n=2, return_token_ids=True)]
        ids = [[i for part in parts if part["index"] == k for i in part.get("token_ids", [])] for k in range(2)]
        assert [part["index"] for part in parts[:4]] == [0, 1, 0, 1]
    else:
        _, reply = await ask(http, url, n=2, return_token_ids=True)
        ids = [choice["token_ids"] for choice in reply["choices"]]
    assert ids == [entry.completion_ids for entry in engine.ground_truth]
    assert ids[0] != ids[1]


async def test_random_replies_call_offered_tools_and_parse(http, url, engine):
    kinds = set()
    for i in range(30):
        _, reply = await ask(http, url, messages=[{"role": "user", "content": f"question {i}"}])
        message = reply["choices"][0]["message"]
        kinds.add((bool(message["reasoning"].strip()), "tool_calls" in message))
        for called in message.get("tool_calls", []):
            assert called["function"]["name"] == "bash"
            json.loads(called["function"]["arguments"])
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
    _, reply = await ask(http, url, messages=[{"role": "user", "content": "no tools"}], tools=None)
    assert "tool_calls" not in reply["choices"][0]["message"]
    assert reply["choices"][0]["message"]["content"]


async def test_invalid_history_is_repaired_by_new_engines_and_refused_by_old_ones(http, url, engine):
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"cmd": "l'}}
    history = [{"role": "user", "content": "EPISODE:demo"}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    status, _ = await ask(http, url, messages=history)
    assert status == 200
    assert '"arguments": {}}' in engine.tokenizer.decode(engine.ground_truth[0].prompt_ids)
    engine.strict_arguments = True
    status, reply = await ask(http, url, messages=history)
    assert (status, reply["error"]["code"]) == (400, 400)
    status, _ = await ask(http, url, messages=history, kv_transfer_params={"prompt_token_ids": engine.ground_truth[0].prompt_ids})
    assert status == 200


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"messages": "x"}, 400, "body.messages"),
        ({"messages": []}, 400, None),
        ({"temperature": "hot"}, 400, "body.temperature"),
        ({"kv_transfer_params": [1]}, 400, "body.kv_transfer_params"),
        ({"tools": []}, 400, "tools"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"tool_choice": "zzz"}, 400, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, 400, "input_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, None),
    ],
)
async def test_refusals_have_the_form_of_openais(http, url, engine, *, body, status, param):
    engine.max_model_len = 1000
    got, reply = await ask(http, url, **body)
    assert (got, reply["error"]["code"], reply["error"]["param"]) == (status, status, param)
    assert list(reply["error"]) == ["message", "type", "param", "code"]
    assert not engine.ground_truth


@pytest.mark.parametrize("raw", [b'{"model": ', b"", b"[1]"])
async def test_bodies_that_are_not_requests(http, url, raw):
    async with http.post(f"{url}/v1/chat/completions", data=raw, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "Bad Request"


async def test_unknown_fields_are_ignored(http, url):
    status, _ = await ask(http, url, required_prefix_token_ids=[1], reasoning_effort="high", whatever={"a": 1})
    assert status == 200


async def test_the_other_routes(http, url, engine, sdk):
    for path in ("/health", "/ping"):
        async with http.get(url + path) as response:
            assert (response.status, await response.read()) == (200, b"")
    async with http.get(f"{url}/version") as response:
        assert await response.json() == {"version": "0.32.0"}
    models = [model async for model in sdk.models.list()]
    assert [(model.id, model.model_extra["max_model_len"]) for model in models] == [("sim", engine.max_model_len)]
    async with http.get(f"{url}/nothing") as response:
        assert (response.status, await response.json()) == (404, {"detail": "Not Found"})
    async with http.get(f"{url}/v1/chat/completions") as response:
        assert (response.status, await response.json()) == (405, {"detail": "Method Not Allowed"})


async def test_sessions_and_requests_are_recorded(http, url, engine):
    async with http.post(f"{url}/v1/chat/completions", json=ASK, headers={"X-Session-ID": "s1", "X-Request-Id": "r1"}) as response:
        assert (await response.json())["id"] == "chatcmpl-r1"
    assert (engine.ground_truth[0].session, engine.ground_truth[0].request_id) == ("s1", "chatcmpl-r1")
    assert engine.requests == [ASK]
    assert engine.headers[0]["X-Session-ID"] == "s1"
    async with http.get(f"{url}/books") as response:
        assert [entry["completion_ids"] for entry in await response.json()] == [engine.ground_truth[0].completion_ids]


async def test_a_client_that_disconnects_aborts_the_generation(http, url, engine):
    engine.token_delay = 0.01
    async with http.post(f"{url}/v1/chat/completions", json={**ASK, "stream": True}) as response:
        await response.content.readany()
    await engine.until(lambda: engine.ground_truth[0].aborted)
    entry = engine.ground_truth[0]
    emitted = list(entry.completion_ids)
    assert entry.finish_reason == "abort"
    assert EPISODES["demo"][0].startswith(engine.tokenizer.decode(emitted).rstrip("\N{REPLACEMENT CHARACTER}"))
    await ask(http, url, max_tokens=1)
    assert entry.completion_ids == emitted


async def test_an_engine_as_a_process(http, tmp_path):
    (tmp_path / "episodes.json").write_text(json.dumps({"demo": ["</think>Hello."]}))
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "tokencache.testing.engine",
        "--episodes",
        str(tmp_path / "episodes.json"),
        "--model",
        "m",
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        url = (await process.stdout.readline()).decode().strip()
        status, reply = await ask(http, url, model="m")
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "Hello.")
        async with http.get(f"{url}/books") as response:
            assert len(await response.json()) == 1
    finally:
        process.terminate()
    assert await process.wait() == 0
