"""Returns ids and log probabilities as packed bytes (vLLM 0.27 to 0.33), for requests with `"packed": true` (`prefixes`).

vLLM writes an object with six members for the log probability of each token, as text, and makes and validates each in Python. A choice of
a packed answer, or of a chunk, has this member, and `null` for `token_ids` and `logprobs`:

    "tokencache": {"ids": "AQAAAA==",         the ids: int32, little endian, base64
                   "logprobs": "ZgAAgL8="}    their log probabilities: `f` and float32, or `d` and float64; little endian, base64

An answer that has the ids of its prompt, or the first chunk of one, has this member, and `null` for `prompt_token_ids`:

    "tokencache": {"prompt": "AQAAAA=="}

Float32 is used if it loses nothing: the values are exactly those that vLLM would have written. A token without a log probability has
-9999, as in vLLM's own answer.
"""

import base64
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokencache_vllm.kept_prefixes import little_endian, pack
from tokencache_vllm.patch import MARK, UnknownVllmError, check_signature
from tokencache_vllm.response_headers import served

MEMBER = "tokencache"
CHOICES = ("ChatCompletionResponseChoice", "ChatCompletionResponseStreamChoice")
_METHOD = "_create_chat_logprobs"
_PARAMETERS = "self token_ids top_logprobs tokenizer num_output_top_logprobs logprob_token_ids return_as_token_id".split()  # noqa: SIM905
_LOWEST = -9999.0
"""vLLM's smallest log probability in an answer."""


class _PackedLogprobs(bytes):
    """Packed log probabilities, on their way from the method that makes them to the choice."""


def pack_logprobs(values: Sequence[float]) -> bytes:
    """Pack log probabilities without loss: `f` and float32, or `d` and float64; no values are no bytes."""
    if not values:
        return b""
    single = array("f", values)
    return b"f" + little_endian(single) if single.tolist() == list(values) else b"d" + little_endian(array("d", values))


def pack_prompt(ids: Sequence[int]) -> dict[str, Any]:
    """Return the member of an answer with the ids of its prompt."""
    return {MEMBER: {"prompt": base64.b64encode(pack(ids)).decode()}}


def patch_replies(serving: Any) -> None:
    """Wrap the classes of choices, and the method that makes log probabilities, of vLLM's module `serving`.

    Raises:
        UnknownVllmError: the code of this vLLM is not as expected. Nothing was changed.
    """
    try:
        handler, choices = serving.OpenAIServingChat, {name: getattr(serving, name) for name in CHOICES}
        original = getattr(handler, _METHOD)
    except AttributeError as why:
        raise UnknownVllmError(f"its code is not as expected: {why}") from why
    if hasattr(original, MARK):
        return
    check_signature(original, f"OpenAIServingChat.{_METHOD}", (_PARAMETERS,), coroutine=False)

    @functools.wraps(original)
    def create(self: Any, token_ids: Sequence[int], top_logprobs: Sequence[Mapping[int, Any] | None], *rest: Any, **named: Any) -> Any:
        if not _packs():
            return original(self, token_ids, top_logprobs, *rest, **named)
        found = [(step or {}).get(token) for token, step in zip(token_ids, top_logprobs, strict=False)]
        return _PackedLogprobs(pack_logprobs([max(one.logprob, _LOWEST) if one is not None else _LOWEST for one in found]))

    setattr(create, MARK, original)
    setattr(handler, _METHOD, create)
    for name, choice in choices.items():
        setattr(serving, name, _packing(choice))


def _packs() -> bool:
    request = served()
    return request is not None and request.prefixed is not None and request.prefixed.packed


def _packing(choice: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the constructor of a choice: moves ids and log probabilities into the packed member."""

    def make(**members: Any) -> Any:
        if not _packs():
            return choice(**members)
        ids, logprobs = members.get("token_ids"), members.get("logprobs")
        if ids is not None:
            packed = {"ids": base64.b64encode(pack(ids)).decode(), "logprobs": base64.b64encode(logprobs or b"").decode()}
            members |= {"token_ids": None, MEMBER: packed}
        return choice(**members | {"logprobs": None})

    return make
