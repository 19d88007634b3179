"""What the record claims is what a real vLLM did: ids that a thinking budget forced, and the end of a reply that the limit cut."""

import json

import pytest
from conftest import MAX_MODEL_LEN
from rig.harness import TOOLS
from rig.marks import marks_of
from rig.model import make_model
from rig.server import MODEL, VllmServer

BUDGET = 6
THOUGHT = "<think>\nOne two three four five six seven eight nine ten eleven twelve thirteen fourteen.\n</think>\n\nDone."
CALLS = "<think>\nx\n</think>\n\n" + "\n".join(
    f"<tool_call>\n<function=bash>\n<parameter=cmd>\n{command}\n</parameter>\n</function>\n</tool_call>"
    for command in ("ls", "printf 12345678901234567890 && echo a long tail that is cut off somewhere")
)
TALKS = ["<think>\nSkinny first.\n</think>\n\nOne. ", "<think>\nInvisible second.\n</think>\n\nTwo. "]
WORK = "<think>\nInvisible.\n</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
EPISODES = {
    "talks": TALKS,
    "works": [WORK, WORK, TALKS[0]],
    "thinks": [THOUGHT],
    "brief": ["<think>\nOk.\n</think>\n\nDone."],
    "calls": [CALLS],
}
PHRASE = "Enough.\n</think>"
OPTIONS = {
    "its own end": [],
    "a phrase": ["--reasoning-config", json.dumps({"reasoning_start_str": "<think>", "reasoning_end_str": PHRASE})],
}


@pytest.fixture(params=OPTIONS)
def vllm_server(request, servers, tmp_path_factory):
    def start():
        model = make_model(servers.tokenizer_dir("own"), tmp_path_factory.mktemp("model"))
        options = ["--reasoning-parser", "deepseek_r1", "--tool-call-parser", "qwen3_coder", *OPTIONS[request.param]]
        return VllmServer(model, EPISODES, max_model_len=MAX_MODEL_LEN, workdir=tmp_path_factory.mktemp("vllm"), options=options)

    return servers.keep(f"budgets with {request.param}", start)


async def turn_of(proxied, path, body, session):
    """A call's record: its turn, ids, mask and log probabilities."""
    async with proxied.http.post(f"{proxied.url}/s/{session}{path}", json={"model": MODEL, **body}) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    async with proxied.http.get(f"{proxied.url}/tokencache/v1/sessions/{session}/trajectories") as answer:
        exported = await answer.json()
    assert exported["complete"]
    (sequence,) = exported["sequences"]
    (turn,) = sequence["turns"]
    start, end = turn["completion"]
    return turn, sequence["token_ids"][start:end], sequence["loss_mask"][start:end], sequence["logprobs"][start:end]


def asks(path, episode, budget, stream):
    body = {"messages": [{"role": "user", "content": f"EPISODE:{episode}"}], "max_tokens": 60, "stream": stream}
    if path == "/v1/messages":
        tools = [{"name": "bash", "input_schema": {"type": "object", "properties": {"cmd": {"type": "string"}}}}]
        return {**body, "tools": tools, "thinking": {"type": "enabled", "budget_tokens": budget}}
    return {**body, "tools": TOOLS, "thinking_token_budget": budget}


async def ids_of(proxied, text):
    return (await proxied.post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_the_end_that_a_budget_forced(proxied, request, path, stream):
    turn, ids, mask, logprobs = await turn_of(proxied, path, asks(path, "thinks", BUDGET, stream), f"long{stream}{path[-4:]}")
    own = request.node.callspec.params["vllm_server"] == "its own end"
    forced = await ids_of(proxied, "</think>" if own else PHRASE)
    at = BUDGET + 1
    assert ids[at : at + len(forced)] == forced
    assert turn["forced"] == [[at, at + len(forced)]]
    assert marks_of(turn) == ["forced"]
    assert mask == [int(not at <= place < at + len(forced)) for place in range(len(ids))]
    assert not any(logprobs[at : at + len(forced)])
    assert turn["sampling"]["thinking_token_budget"] == BUDGET
    assert ids.count(forced[-1]) == 2  # the second is the script's own


async def test_an_end_that_the_policy_chose(proxied):
    turn, ids, mask, _ = await turn_of(proxied, "/v1/chat/completions", asks("", "brief", 50, stream=False), "brief")
    assert (await ids_of(proxied, "</think>"))[0] in ids
    assert (set(mask), turn["forced"], marks_of(turn)) == ({1}, [], [])


@pytest.mark.parametrize("vllm_server", ["its own end"], indirect=True)
async def test_a_whole_reply_that_the_limit_cut_is_recorded_as_the_streamed_one(proxied):
    """vLLM calls the whole one `tool_calls`, because its first call is complete."""
    endings = []
    for stream in (False, True):
        body = {**asks("", "calls", -1, stream), "max_tokens": 62}
        turn, ids, *_ = await turn_of(proxied, "/v1/chat/completions", body, f"cut{stream}")
        assert len(ids) == 62
        endings.append((turn["finish_reason"], turn["engine_reason"]))
    assert endings == [("length", "tool_calls"), ("length", "")]
