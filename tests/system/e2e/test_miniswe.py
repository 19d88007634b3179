"""mini-swe-agent, a real unmodified harness, does a real task through the proxy on a real vLLM."""

import asyncio
import os

import pytest
from rig.exported import generations, trajectory, turns
from rig.miniswe import run_miniswe

pytestmark = pytest.mark.skipif("TOKENCACHE_E2E_NO_MINISWE" in os.environ, reason="mini-swe-agent was not requested")

WAYS = {
    "path": lambda url: (f"{url}/s/swe/v1", None, "none"),
    "header": lambda url: (f"{url}/v1", {"X-Tokencache-Session": "swe"}, "none"),
    "key": lambda url: (f"{url}/v1", None, "tcs-swe"),
}


@pytest.mark.parametrize("way", WAYS)
async def test_mini_swe_agent_does_a_task(proxied, tmp_path, figures, way):
    """The session is named in the base URL, a header, or the API key. The file exists, the trajectory is complete."""
    base, headers, key = WAYS[way](proxied.url)
    run = await asyncio.to_thread(run_miniswe, base, headers, "EPISODE:miniswe write answer.txt", tmp_path, api_key=key)
    assert run.returncode == 0, run.output
    assert run.exit_status == "Submitted"
    assert (tmp_path / "answer.txt").read_text() == "exact tokens\n"

    replies = [message for message in run.messages if message["role"] == "assistant"]
    exported = await trajectory(proxied, "swe")
    assert exported["complete"], exported["incidents"]
    assert exported["incidents"] == []
    (sequence,) = exported["sequences"]
    assert [turn["match"] for turn in sequence["turns"]] == ["root"] + ["continue"] * (len(replies) - 1)
    assert len(sequence["turns"]) == len(replies) == 3

    found = generations(exported)
    for (prompt, ids, logprobs), message, turn in zip(found, replies, await turns(proxied, "swe"), strict=True):
        assert len(ids) == len(logprobs) == message["extra"]["response"]["usage"]["completion_tokens"]
        assert len(prompt) == message["extra"]["response"]["usage"]["prompt_tokens"]
        text = await proxied.detokenize(list(ids))
        for call in message["tool_calls"]:
            assert call["function"]["arguments"] in text
        assert [call["id"] for call in turn["served"]["tool_calls"]] == [call["id"] for call in message["tool_calls"]]
    whole = await proxied.detokenize(sequence["token_ids"])
    assert "exact tokens" in whole
    assert whole.count("<tool_response>") == 3
    figures.append(f"mini-swe-agent, session in the {way}: {len(replies)} turns in one sequence of {len(sequence['token_ids'])} tokens")
