"""What vLLM 0.32's tool parsers drop: replies of `tests/core/lost_text.json`, read by the parsers themselves, and one of a real server."""

import json
import re
from pathlib import Path

import pytest
from rig.harness import TOOLS
from rig.server import MODEL
from test_parsers import Parsers

import tests.core
from tokencache.client import AsyncClient

PARSERS = json.loads(Path(tests.core.__file__).with_name("lost_text.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def parsers(tmp_path_factory):
    made = Parsers(tmp_path_factory.mktemp("tokenizer"))
    yield made
    made.close()


@pytest.mark.parametrize("name", PARSERS)
def test_replies_are_read_as_recorded(parsers, name):
    tokens = [*re.findall(r"<[^<>\s]+>", PARSERS[name]["rendering"]), "<|python_tag|>"]  # Llama's parser looks that one up
    for kind, reply in PARSERS[name]["replies"].items():
        assert parsers.ask("calls", name, tokens, reply["text"]) == [reply["whole"], reply["stream"]], kind


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_real_server(proxied, stream):
    session, messages = f"late{stream}", [{"role": "user", "content": "EPISODE:late"}]
    for _ in range(2):
        body = {"model": MODEL, "messages": messages, "tools": TOOLS, "stream": stream, "max_tokens": 200}
        async with proxied.http.post(f"{proxied.url}/s/{session}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            await answer.read()
        messages = [*messages, {"role": "assistant", "content": "Let me look."}, {"role": "user", "content": "and?"}]
    async with AsyncClient(proxied.url) as client:
        changes = await client.session(session).changes()
    assert [(change.lost, change.not_compared) for change in changes] == [(["Then I read — naïve café ☕."], ""), ([], "")]
