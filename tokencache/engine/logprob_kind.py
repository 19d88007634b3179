"""Tests which distribution an engine's log probabilities describe.

vLLM's `--logprobs-mode` sets this for all requests, and no answer reports it. The modes are `raw_logprobs` (the default: the model's own
distribution, before temperature, top-p and masks), `processed_logprobs` (the distribution that was sampled from), and `raw_logits` and
`processed_logits`, which are not log probabilities (0.32, `v1/sample/sampler.py`).

The test sends two requests for one token. Each has a mask that allows a single id (`allowed_token_ids`, a different id each time), and
requests the likeliest ids (`top_logprobs`):

* *processed* log probabilities: the allowed id has probability 1. Both values are exactly 0, and every other id is practically impossible
  (vLLM writes -9999 for minus infinity).
* *raw* log probabilities: the mask has no effect on them. Other ids have values, and no value is above 0. The probabilities of one request
  add up to at most 1, and so do the two sampled ones. (That is why there are two requests: a single id could have probability 1.) The
  likeliest id has at least `1 / vocabulary`.
* Anything else is not a log probability, or cannot be identified: the kind is `""`, with the reason.
"""

import math
from typing import Literal, NamedTuple

import msgspec

from tokencache.engine.upstream import AskChat
from tokencache.errors import EngineError

Raw = msgspec.Raw
LogprobKind = Literal["raw", "processed", ""]

NONE = "no log probabilities"
"""The first words of every finding that the values are not logarithms of probabilities."""

_ALTERNATIVES = 5
_IMPOSSIBLE = -1000.0
"""An id among the likeliest with a lower log probability than this must be masked."""
_FAINTEST = math.log(2**-22)
"""The likeliest of four million ids has at least this log probability."""
_EXACT, _ROUNDED = 1e-6, 1e-2
"""Tolerance for a log probability of 0, and for a sum of probabilities from a 16-bit model."""


class KindFinding(NamedTuple):
    """The kind of log probabilities, and how it was identified, in words."""

    kind: LogprobKind
    seen: str


class _Alternative(msgspec.Struct):
    logprob: float


class _Token(msgspec.Struct):
    logprob: float
    top_logprobs: list[_Alternative] = []


async def find_logprob_kind(ask: AskChat, model: str, messages: Raw, tokens: tuple[int, int]) -> KindFinding:
    """Identify an engine's log probabilities; `tokens` are any two ids of its vocabulary."""
    values = []
    for token in tokens:
        found = await _under_mask(ask, model, messages, token)
        if found is None:
            return KindFinding("", "no log probability of a token that was the only one allowed")
        values.append(found)
    return judge(values)


async def _under_mask(ask: AskChat, model: str, messages: Raw, token: int) -> _Token | None:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 1,
        "temperature": 1.0,
        "allowed_token_ids": [token],
        "logprobs": True,
        "top_logprobs": _ALTERNATIVES,
        "return_token_ids": True,
    }
    try:
        choice = (await ask(body)).json()["choices"][0]
        found = msgspec.convert(choice["logprobs"]["content"][0], _Token)
    except (EngineError, ValueError, LookupError, TypeError):
        return None
    return found if choice.get("token_ids") == [token] else None  # an ignored mask proves nothing


def judge(values: "list[_Token]") -> KindFinding:
    """Identify the kind from the values of two tokens, each sampled under a mask that allowed no other id."""
    if not all(value.top_logprobs for value in values):
        return KindFinding("", "the engine reports only the sampled id, not the likeliest ids")
    own = [value.logprob for value in values]
    shown = " and ".join(f"{value:.6g}" for value in own)
    likeliest = [[one.logprob for one in value.top_logprobs] for value in values]
    possible = [[logprob for logprob in logprobs if logprob > _IMPOSSIBLE] for logprobs in likeliest]
    if all(len(logprobs) <= 1 for logprobs in possible):
        if all(abs(value) <= _EXACT for value in own):
            return KindFinding("processed", f"under a mask that allows one id: {shown}, and every other id is impossible")
        return KindFinding("", f"{NONE}: under a mask that allows one id: {shown}, where only 0 is right (--logprobs-mode?)")
    tops = [max(logprobs) for logprobs in likeliest]
    in_range = max(*own, *tops) <= _ROUNDED and min(tops) >= _FAINTEST  # checked first: `math.exp` raises OverflowError above 709
    if not in_range or max(sum(map(math.exp, logprobs)) for logprobs in (own, *likeliest)) > 1 + _ROUNDED:
        return KindFinding("", f"{NONE}: {shown}, the likeliest {tops[0]:.6g}: no distribution has these (--logprobs-mode?)")
    return KindFinding("raw", f"under a mask that allows one id: {shown}, and other ids are as likely as without it")
