"""Log probabilities: of which distribution are they? Found out by asking.

vLLM's `--logprobs-mode` decides it for all requests, and no answer names it: `raw_logprobs` (the default: the model's own
distribution, before temperature, top-p and masks), `processed_logprobs` (that which was sampled from), or `raw_logits` and
`processed_logits`, which are no log probabilities at all (0.32, `v1/sample/sampler.py`).

Asked are two calls of one token, each under a mask that allows a single id (`allowed_token_ids`), another each time, with the
likeliest ids beside it (`top_logprobs`):

* *processed* log probabilities: what the mask leaves has probability 1. Both are exactly 0, and every other id is as good as
  impossible (vLLM writes -9999 for minus infinity).
* *raw* ones: the mask does not show. Other ids have values, none is above 0, the probabilities add up to 1 at most, those of one
  call and the two of both (that is why there are two: one id alone could be certain), and the likeliest of them all has one of
  `1 / vocabulary` at least.
* whatever is neither is no log probability, or not to be told: the kind is `""`, and it is said why.
"""

import math
from typing import Literal, NamedTuple

import msgspec

from tokencache.engine.drivers.base import CHAT, Asks
from tokencache.errors import EngineError

Raw = msgspec.Raw
Kind = Literal["raw", "processed", ""]

NONE = "no log probabilities"
"""Begins what is said where the values are no logarithms of probabilities."""

_ALTERNATIVES = 5
_IMPOSSIBLE = -1000.0
"""No engine gives a probability this small to an id that it lists among the likeliest, unless it is masked."""
_FAINTEST = math.log(2**-22)
"""The likeliest of four million ids has at least this."""
_EXACT, _ROUNDED = 1e-6, 1e-2
"""How far from its true value a log probability of 0 may be, and a sum of probabilities that a 16-bit model made."""


class Finding(NamedTuple):
    """What the log probabilities are, and how that was seen, in words."""

    kind: Kind
    seen: str


class _Chance(msgspec.Struct):
    logprob: float


class _Token(msgspec.Struct):
    logprob: float
    top_logprobs: list[_Chance] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] = []


_BODY = msgspec.json.Decoder(_Body)


async def logprob_kind(asked: Asks, model: str, messages: Raw, tokens: tuple[int, int]) -> Finding:
    """Find out what an engine's log probabilities are; `tokens` are two ids of its vocabulary, of any meaning."""
    values = []
    for token in tokens:
        found = await _under_mask(asked, model, messages, token)
        if found is None:
            return Finding("", "no log probability of a token that was the only one allowed")
        values.append(found)
    return judge(values)


async def _under_mask(asked: Asks, model: str, messages: Raw, token: int) -> _Token | None:
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
        answer = await asked.post(CHAT, body)
        choice = _BODY.decode(answer.body).choices[0]
    except (EngineError, ValueError, IndexError):
        return None
    said = choice.logprobs.content if choice.logprobs is not None else None
    return said[0] if choice.token_ids == [token] and said else None  # a mask that is not kept proves nothing


def judge(values: "list[_Token]") -> Finding:
    """Judge what was said of two tokens, each sampled under a mask that allowed nothing else."""
    if not all(value.top_logprobs for value in values):
        return Finding("", "the engine does not tell the likeliest ids beside the sampled one")
    own = [value.logprob for value in values]
    said = " and ".join(f"{value:.6g}" for value in own)
    likeliest = [[chance.logprob for chance in value.top_logprobs] for value in values]
    possible = [[chance for chance in chances if chance > _IMPOSSIBLE] for chances in likeliest]
    if all(len(chances) <= 1 for chances in possible):
        if all(abs(value) <= _EXACT for value in own):
            return Finding("processed", f"under a mask that allows one id: {said}, and every other id is impossible")
        return Finding("", f"{NONE}: under a mask that allows one id: {said}, where 0 is the only one (--logprobs-mode?)")
    sums = [sum(map(math.exp, own)), *(sum(map(math.exp, chances)) for chances in possible)]
    if max(*own, *possible[0], *possible[1]) > _ROUNDED or max(sums) > 1 + _ROUNDED or min(map(max, possible)) < _FAINTEST:
        top = f"{max(possible[0]):.6g}"
        return Finding("", f"{NONE}: {said}, the likeliest {top}: these are none of any distribution (--logprobs-mode?)")
    return Finding("raw", f"under a mask that allows one id: {said}, and other ids are as likely as before")
