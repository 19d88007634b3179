"""Probes: which ones the proxy answers, which ones it relays, and with what."""

import asyncio
import json

import openai
import pytest

from tests.dialects.gemini.kit import asked
from tests.proxy.kit import proxied
from tokencache.dialects.probes import ProbeDialect
from tokencache.dialects.registry import dialect_of
from tokencache.errors import HarnessError


def ask(path, method="GET"):
    return asyncio.run(ProbeDialect().parse(asked(path=path, method=method)))


@pytest.mark.parametrize(
    ("method", "path", "ours"),
    [
        ("GET", "/", False),
        ("HEAD", "/", True),
        ("GET", "/v1", False),
        ("HEAD", "/v1", True),
        ("HEAD", "/v1/models", True),
        ("GET", "/v1/models", False),
        ("GET", "/v1/models/Qwen/Qwen3-8B", True),
        ("HEAD", "/api/hello", True),
        ("POST", "/api/show", True),
        ("GET", "/api/v1/models", True),
        ("GET", "/props", True),
        ("GET", "/health", False),
        ("GET", "/version", False),
        ("POST", "/", False),
        ("POST", "/v1/chat/completions", False),
        ("DELETE", "/v1/models/m", False),
    ],
)
def test_which_probes_the_proxy_answers(method, path, ours):
    found = dialect_of(method, path, {})
    assert (found is not None and found.name == "probe") is ours


def test_model_lists_belong_to_the_client_s_dialect():
    assert dialect_of("GET", "/v1/models/m", {"anthropic-version": "2023-06-01"}).name == "messages"
    assert dialect_of("GET", "/v1/models/m", {"x-goog-api-key": "k"}).name == "gemini"


def test_answers():
    assert ask("/", "HEAD").status == ask("/v1/models", "HEAD").status == 200
    assert json.loads(ask("/v1/models/m").body) == {"id": "m", "object": "model", "created": 0, "owned_by": "vllm", "max_model_len": 4096}
    for path in ("/v1/models/Qwen/Qwen3-8B", "/v1/models/Qwen%2FQwen3-8B"):
        assert json.loads(ask(path).body)["id"] == "Qwen/Qwen3-8B"
    assert (ask("/api/tags").status, ask("/api/tags").body) == (404, b'{"detail":"Not Found"}')
    with pytest.raises(HarnessError) as missing:
        ask("/v1/models/none")
    assert missing.value.status == 404
    said = json.loads(ProbeDialect().error(404, str(missing.value), missing.value.kind, missing.value.param))
    assert said == {"error": {"message": "The model `none` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}}


async def test_through_the_proxy():
    async with proxied() as rig:
        for method, path, status in (
            ("HEAD", "/", 200),
            ("HEAD", "/v1/models", 200),
            ("GET", "/v1/models/sim", 200),
            ("GET", "/v1/models/none", 404),
            ("POST", "/api/show", 404),
            ("GET", "/version", 200),
        ):
            async with rig.http.request(method, f"{rig.url}/s/r1{path}") as answer:
                assert answer.status == status, (method, path)
        async with openai.AsyncOpenAI(base_url=f"{rig.url}/s/r1/v1", api_key="none", max_retries=0) as sdk:
            assert (await sdk.models.retrieve("sim")).max_model_len == rig.engine.max_model_len
            with pytest.raises(openai.NotFoundError):
                await sdk.models.retrieve("none")
