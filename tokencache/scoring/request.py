"""The request for the log probabilities of given token ids, and how its reply is read.

`POST /v1/completions` with the ids as `prompt` and `prompt_logprobs` k makes vLLM return, for each token but the first, its own log
probability and those of the k likeliest tokens at its place. They describe the model's own distribution, before temperature, top-p and
masks, in each `--logprobs-mode` but the two that return logits. (Executed on 0.32: equal to the recorded raw values, 0.0 in float32.)

vLLM does not read the prefix cache for such a request, but it writes it. So each request has a `cache_salt` of its own run: no rollout
reads keys and values that scoring computed.
"""

from typing import Any, NamedTuple

import msgspec

from tokencache.trajectories.values import Sequence as TokenSequenceValue

MOST_TOP = 20
"""The largest k of an engine that was started without `--max-logprobs`."""

VALUES_AT_ONCE = 65_536
"""The default limit: this many log probabilities in progress, so tokens times (1 + `top`). One is some 80 bytes of the reply."""
_MOST_WORDS = 300


class ScoringError(Exception):
    """The engine returned no log probabilities for these ids. The message says why."""


class OtherIdsError(ScoringError):
    """The engine reports other prompt ids than those that it was sent."""


class Scores(NamedTuple):
    """The log probabilities of a sequence of n tokens, natural logarithms.

    Attributes:
        logprobs: n values; the first is 0.0, because nothing precedes the first token.
        top_ids, top_logprobs: for each token the likeliest tokens at its place, the likeliest first, and their log probabilities. The
            lists of the first token are empty. Without `top`, the outer lists are empty, too.
        size: bytes of the reply.
    """

    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    size: int


class _Entry(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _ScoredChoice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Entry] | None] | None = None
    prompt_token_ids: list[int] | None = None


class _ScoredReply(msgspec.Struct):
    choices: list[_ScoredChoice]


_REPLY = msgspec.json.Decoder(_ScoredReply)


def unscorable(sequence: TokenSequenceValue) -> str:
    """Return why the ids of a sequence cannot be scored; `""` if they can. Without its images the engine would compute other values."""
    has_media = sequence.media or sequence.has_unplaced_media
    return "its sequence has media, whose ids cannot be scored" if has_media else ""


def default_tokens_at_once(top: int) -> int:
    """Return the default limit of tokens in progress, if the `top` likeliest tokens are requested."""
    return VALUES_AT_ONCE // (1 + top)


def scoring_request(ids: list[int], model: str, *, top: int, salt: str) -> dict[str, Any]:
    """Return the body of the request. It makes the engine sample one token, because vLLM refuses to sample none."""
    return {
        "model": model,
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": top,
        "return_token_ids": True,
        "cache_salt": salt,
    }


def read_scores(reply: bytes, ids: list[int], *, top: int) -> Scores:
    """Read the reply for these ids.

    Raises:
        OtherIdsError: the engine used other ids.
        ScoringError: the reply has no log probability for some token.
    """
    try:
        (choice,) = _REPLY.decode(reply).choices
    except (msgspec.DecodeError, ValueError) as why:
        raise ScoringError(f"the engine's reply cannot be read: {why}") from None
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != ids:
        raise OtherIdsError(f"the engine used other prompt ids than it was sent: {len(choice.prompt_token_ids)} for {len(ids)}")
    found = choice.prompt_logprobs
    if found is None or len(found) != len(ids):
        count = "none" if found is None else f"{len(found)} for {len(ids)} tokens"
        raise ScoringError(f"the engine returned no prompt_logprobs for each token ({count}); it must be vLLM, called at its own URL")
    logprobs, top_ids, top_logprobs = [0.0], list[list[int]]([[]]), list[list[float]]([[]])
    for token, entries in zip(ids[1:], found[1:], strict=True):
        own = None if entries is None else entries.get(token)
        if entries is None or own is None:
            raise OtherIdsError(f"the engine returned no log probability for token {token} at place {len(logprobs)}: it used other ids")
        logprobs.append(own.logprob)
        if top:
            likeliest = sorted(entries.items(), key=lambda entry: -entry[1].logprob)[:top]
            top_ids.append([other for other, _ in likeliest])
            top_logprobs.append([entry.logprob for _, entry in likeliest])
    return Scores(logprobs, top_ids if top else [], top_logprobs if top else [], len(reply))


def refusal_words(status: int, body: bytes) -> str:
    """Return what the engine says about a request that it refuses."""
    try:
        error = msgspec.json.decode(body)["error"]
        words = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        words = body.decode(errors="replace")
    return f"the engine refuses with {status}: {' '.join(str(words).split())[:_MOST_WORDS]}"
