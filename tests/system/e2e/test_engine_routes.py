"""Each route of a running vLLM is served by a dialect, known to sample nothing, or known to sample without a record."""

from tokencache.dialects.chat.routes import ROUTES
from tokencache.dialects.registry import dialect_of
from tokencache.engine.routes import LISTED

SAMPLE = {
    *("/v1/chat/completions/batch", "/invocations", "/generative_scoring", "/v1/systemone", "/inference/v1/generate", "/cohere/v2/chat"),
    *("/v1/audio/transcriptions", "/v1/audio/translations"),
}
"""Routes that sample and that no dialect records: a session that uses one is incomplete (`unrecorded-route`)."""


async def test_each_route_is_decided(proxied):
    async with proxied.http.get(f"{proxied.vllm}/openapi.json") as answer:
        listed = (await answer.json())["paths"]
    found = {(method.upper(), path) for path, methods in listed.items() for method in methods}
    assert ("POST", "/v1/chat/completions") in found
    undecided = {
        (method, path)
        for method, path in found - LISTED
        if path not in ROUTES and path not in SAMPLE and dialect_of(method, path, {}) is None
    }
    assert undecided == set()
