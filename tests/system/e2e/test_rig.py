"""Tests what the other end-to-end tests rely on, on the server alone, without tokencache."""

import json
import os
import urllib.request

import pytest
from rig.miniswe import run_miniswe
from rig.server import LIMIT_S, MODEL

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}},
        },
    },
]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=LIMIT_S) as response:  # noqa: S310
        return json.load(response)


def chat(url, content, **fields):
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "return_token_ids": True, "logprobs": True}
    return post(f"{url}/v1/chat/completions", body | fields)


def test_scripted_turn_is_parsed_and_drifts(vllm, episodes):
    reply = chat(vllm, "EPISODE:tools go", tools=TOOLS)
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"timeout": 10, "command": "ls  -la\\n"}'
    text = episodes["tools"]["turns"][0] + "<|im_end|>"
    assert post(f"{vllm}/detokenize", {"tokens": choice["token_ids"]})["prompt"] == text
    assert post(f"{vllm}/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"] != choice["token_ids"]


def test_same_request_gives_the_same_text_in_other_tokens(vllm):
    first, second = (chat(vllm, "EPISODE:hello")["choices"][0] for _ in range(2))
    assert first["message"]["content"] == second["message"]["content"]
    assert first["token_ids"] != second["token_ids"]
    seeded = [chat(vllm, "EPISODE:hello", seed=7)["choices"][0]["token_ids"] for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_turns_follow_the_history(vllm, episodes):
    history = [{"role": "user", "content": "EPISODE:hello"}]
    for expected in ("Hello there, friend — naïve café ☕.", "Once more, without thinking.", "Goodbye."):
        message = post(f"{vllm}/v1/chat/completions", {"model": MODEL, "messages": history})["choices"][0]["message"]
        assert expected in (message["content"] or message["reasoning"])
        history += [{"role": "assistant", "content": expected}, {"role": "user", "content": "and?"}]


def test_prompt_without_tools_gets_the_side_answer(vllm):
    assert chat(vllm, "EPISODE:tools title please")["choices"][0]["message"]["reasoning"] == "Side answer."


def test_unscripted_prompt_has_distinct_logprobs(vllm):
    (choice,) = chat(vllm, "no marker here", max_tokens=40)["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert max(logprobs) - min(logprobs) > 1
    assert len(set(choice["token_ids"])) > len(choice["token_ids"]) // 2


def test_logprobs_are_the_models_own(vllm):
    """What was recorded while sampling is what the model computes when it reads the same ids: trainers rely on it."""
    reply = chat(vllm, "no marker here", max_tokens=24)
    ids = reply["choices"][0]["token_ids"]
    sampled = [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]]
    body = {"model": MODEL, "prompt": reply["prompt_token_ids"] + ids, "max_tokens": 1, "prompt_logprobs": 0}
    read = post(f"{vllm}/v1/completions", body)["choices"][0]["prompt_logprobs"][-len(ids) :]
    assert [entry[str(token_id)]["logprob"] for entry, token_id in zip(read, ids, strict=True)] == pytest.approx(sampled, abs=1e-3)


def test_only_allowed_token(vllm):
    stop = post(f"{vllm}/tokenize", {"prompt": "<|im_end|>", "add_special_tokens": False})["tokens"]
    (choice,) = chat(vllm, "no marker here", max_tokens=2, allowed_token_ids=stop)["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (stop, "stop")


def test_script_ends_where_a_grammar_excludes_it(vllm):
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}}
    (choice,) = chat(vllm, "EPISODE:hello", max_tokens=200, chat_template_kwargs={"enable_thinking": False}, **fields)["choices"]
    assert json.loads(choice["message"]["content"]) in ("yes", "no")


def test_mini_swe_agent_does_a_task(vllm, tmp_path):
    if "TOKENCACHE_E2E_NO_MINISWE" in os.environ:
        pytest.skip("mini-swe-agent was not requested")
    run = run_miniswe(f"{vllm}/v1", {"X-Some-Header": "1"}, "EPISODE:miniswe write answer.txt", tmp_path)
    assert run.returncode == 0, run.output
    assert (tmp_path / "answer.txt").read_text() == "exact tokens\n"
    assert run.exit_status == "Submitted"
    assert [message["role"] for message in run.messages].count("assistant") == 3
