"""Simulates `/inference/v1/generate` of vLLM 0.32: ids in, ids and log probabilities out, without template and parsers.

Only `output_mode: "text"` and whole replies are simulated.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokencache.testing import wire
from tokencache.testing.chat_request import ChatRequest
from tokencache.testing.completion import TextCompletion, read_text_request
from tokencache.testing.errors import senseless
from tokencache.testing.generation import Token
from tokencache.testing.tokenizer import SimTokenizer

GENERATE = "/inference/v1/generate"


def read_generate_request(body: Mapping[str, Any], headers: Mapping[str, str], tokenizer: SimTokenizer, *, served: str) -> ChatRequest:
    """Check the body of a request. Returns its settings, as a chat request without messages.

    Raises:
        RefusalResponse: vLLM would refuse the request, or it uses a feature that is not simulated.
    """
    for name in ("features", "stream"):
        if body.get(name):
            raise senseless(f"`{name}` is not simulated.", name)
    settings = {name: value for name, value in body["sampling_params"].items() if value is not None}
    settings |= {name: body.get(name) for name in ("model", "cache_salt")}
    settings |= {"prompt": body["token_ids"], "return_token_ids": True, "include_reasoning": not body.get("reasoning_ended")}
    request, _ = read_text_request(settings, headers, tokenizer, served=served)
    return request


class GeneratedCompletion(TextCompletion):
    """A reply in progress."""

    __slots__ = ()

    async def whole(self) -> dict[str, Any]:
        """See `Completion.whole`."""
        completion = await TextCompletion.whole(self)
        choices = [
            {name: choice[name] for name in ("index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs", "routed_experts")}
            for choice in completion["choices"]
        ]
        return {
            "request_id": f"generate-tokens-{self.request.request_id}", "model": self.request.model, "created": self.created,
            "usage": self._usage(), "prompt_token_ids": self.prompts[0], "mm_placeholders": None, "output_mode": "text",
            "kv_transfer_params": None, "metrics": None, "choices": choices,
        }  # fmt: skip

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        del offset
        return wire.logprobs(tokens, self.request) if self.request.logprobs else None
