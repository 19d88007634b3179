"""A model that stops at another id than its template writes at the end of a turn, as a base model with the template of a tuned one."""

import json

import pytest
from conftest import MAX_MODEL_LEN
from rig.model import PAD, STOP, make_model
from rig.server import MODEL, VllmServer


@pytest.fixture
def vllm_server(servers, tmp_path_factory):
    def start():
        model = make_model(servers.tokenizer_dir("own"), tmp_path_factory.mktemp("model"))
        (end,) = [token["id"] for token in json.loads((model / "tokenizer.json").read_text())["added_tokens"] if token["content"] == PAD]
        for name, change in {"config.json": {"eos_token_id": end}, "tokenizer_config.json": {"eos_token": PAD}}.items():
            path = model / name
            path.write_text(json.dumps(json.loads(path.read_text()) | change))
        return VllmServer(model, max_model_len=MAX_MODEL_LEN, scripted=False, workdir=tmp_path_factory.mktemp("vllm"))

    return servers.keep("base model", start)


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
async def test_every_turn_continues(proxied, named):
    """With the end of turn as a stop id of each request, and with replies that only the limit ends."""
    words = [(await proxied.post("/tokenize", {"prompt": word, "add_special_tokens": False}))["tokens"][0] for word in ("a", " the", ".")]
    (end,) = (await proxied.post("/tokenize", {"prompt": STOP, "add_special_tokens": False}))["tokens"]
    asked = {"stop_token_ids": [end], "allowed_token_ids": [*words, end]} if named else {"allowed_token_ids": words, "max_tokens": 8}
    messages, url = [{"role": "user", "content": "go"}], f"{proxied.url}/s/base-{named}/v1/chat/completions"
    for n in range(4):
        body = {"model": MODEL, "messages": messages, "temperature": 1, "seed": 21 + n, "max_tokens": 60, **asked}
        async with proxied.http.post(url, json=body) as answer:
            (choice,) = (await answer.json())["choices"]
        assert choice["stop_reason"] == (end if named else None)
        messages += [choice["message"], {"role": "user", "content": f"more {n}"}]
    async with proxied.http.get(f"{proxied.url}/tokencache/v1/sessions/base-{named}/turns") as answer:
        turns = (await answer.json())["turns"]
    assert [(turn["match"], turn["reason"]) for turn in turns] == [("root", ""), *[("continue", "")] * 3]
    async with proxied.http.get(f"{proxied.url}/readyz") as answer:
        assert (await answer.json())["engine"]["models"][0]["level"] == "exact"
