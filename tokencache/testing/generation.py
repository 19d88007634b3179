"""Generates one reply step by step: limits, stop conditions, text that follows the ids, and log probabilities.

As in vLLM, the text that a client receives may lag behind the tokens. Bytes are decoded as they are sampled, so the first two of the three
tokens of `☕` have no text. Characters that may belong to a stop string are held back. The id that ends the turn is reported, but has no
text.
"""

import codecs
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokencache.testing.chat_request import ChatRequest
from tokencache.testing.tokenizer import SimTokenizer

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""vLLM's `--logprobs-mode`: which values are returned as log probabilities."""
MASKED = -9999.0
"""The value that vLLM writes for minus infinity."""
_LOGIT = 9.0
"""What the modes that return logits add."""
_NEIGHBOURS, _VOCABULARY = 20, 2**18


@dataclass(slots=True)
class Token:
    """One generated token. `text` is what it completed, and `logprobs` shows as `token`. `alone`: no other token was possible."""

    id: int
    text: str
    logprob: float
    alone: bool = False

    def neighbour(self, i: int) -> float:
        """Return the log probability of a made-up token, the `i`th most likely after this one (0: this one itself)."""
        return MASKED if self.alone and i else _float32(self.logprob - 0.5 * i)


@dataclass(slots=True)
class GenerationStep:
    """The content of one chunk: tokens, and the text that became visible with them."""

    tokens: list[Token] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def ids(self) -> list[int]:
        """The ids of the step's tokens."""
        return [token.id for token in self.tokens]


def generate(
    ids: Iterable[int],
    request: ChatRequest,
    tokenizer: SimTokenizer,
    *,
    max_tokens: int,
    eos: int,
    chance: Callable[[int], float],
    first: int = 1,
    chunk: int = 1,
    halted: Callable[[int], bool] = lambda _tokens: False,
    mode: LogprobsMode = "raw_logprobs",
) -> Iterator[GenerationStep]:
    """Yield the steps of one reply, the last of them with a finish reason.

    Args:
        ids: ids that the model would generate.
        request: the request.
        tokenizer: decodes the ids.
        max_tokens: largest number of tokens, at least 1.
        eos: the id at which the engine stops by itself.
        chance: receives each sampled id; returns the number (0 to 1) that decides its log probability.
        first: tokens in the first step. It is one with vLLM's `stream_interval`, and more if its API server lags behind.
        chunk: tokens in each other step.
        halted: receives the number of tokens so far; returns whether the engine aborts the reply there. Tokens that wait for the rest of
            their step are then in the last one.
        mode: which values are returned as log probabilities.
    """
    text = _VisibleText(request)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    step, target = GenerationStep(), first
    for count, token_id in enumerate(ids, 1):
        decoded = "" if tokenizer.is_special(token_id) and token_id != eos else decoder.decode(tokenizer.token_bytes(token_id))
        step.tokens.append(_weighed(token_id, decoded, request, chance(token_id), mode))
        ended_by_id = (token_id == eos and not request.ignore_eos) or token_id in request.stop_token_ids
        if not ended_by_id or request.include_stop_str_in_output:
            step.stop_reason = text.add(decoded)
        if step.stop_reason is not None:
            step.finish_reason = "stop"
        elif ended_by_id:
            step.finish_reason = "stop"
            step.stop_reason = None if token_id == eos else token_id
        elif count >= max_tokens:
            step.finish_reason = "length"
        elif len(step.tokens) < target and halted(count):
            step.finish_reason = "abort"
        if step.finish_reason is not None or len(step.tokens) >= target:
            step.text = text.take(finished=step.finish_reason is not None)
            yield step
            if step.finish_reason is not None:
                return
            step, target = GenerationStep(), chunk


def within_budget(ids: Iterator[int], prompt: Sequence[int], budget: int, tokenizer: SimTokenizer) -> Iterator[int]:
    """Put `</think>` after as many ids of a thought as a budget allows, as vLLM does; the model then goes on as if nothing had happened."""
    begins, ends = tokenizer.id_of("<think>"), tokenizer.id_of("</think>")
    made, began = 0, None
    for place, token_id in enumerate(prompt, 1 - len(prompt)):
        began = place if token_id == begins else None if token_id == ends else began
    for token_id in ids:
        if began is not None and made - began >= budget:
            yield ends
            made, began = made + 1, None
        yield token_id
        made += 1
        began = made if token_id == begins else None if token_id == ends else began


def prompt_token(token_id: int, text: str, chance: float, mode: LogprobsMode) -> Token:
    """Make a token of a prompt. Masks and temperature have no effect on its log probability, in any mode."""
    return Token(token_id, text, _float32(_raw(chance) + (_LOGIT if mode.endswith("logits") else 0.0)))


def _raw(chance: float) -> float:
    return -0.001 - 4.998 * chance


def _weighed(token_id: int, text: str, request: ChatRequest, chance: float, mode: LogprobsMode) -> Token:
    """Make a token with a log probability, which `chance` (0 to 1) decides.

    With a mask the raw values are those of unlikely tokens: the allowed ids are seldom those that the model prefers. A temperature changes
    processed values, as if the token and its made-up neighbours were the likeliest, and the rest were spread over a large vocabulary.
    """
    masked = request.allowed_token_ids is not None
    alone = masked and len(set(request.allowed_token_ids or ())) == 1 and mode.startswith("processed")
    value = -6.0 - chance if masked else _raw(chance)
    temperature = request.body.get("temperature") or 1.0
    if mode == "processed_logprobs" and alone:
        value = 0.0
    elif mode == "processed_logprobs" and temperature != 1.0:
        likeliest = [math.exp(value - 0.5 * i) for i in range(_NEIGHBOURS)]
        rest = max(1.0 - sum(likeliest), 0.0) / _VOCABULARY
        total = sum(p ** (1 / temperature) for p in likeliest) + _VOCABULARY * rest ** (1 / temperature)
        value = value / temperature - math.log(total)
    elif mode.endswith("logits"):
        value += _LOGIT
    return Token(token_id, text, _float32(value), alone)


class _VisibleText:
    """The text of the reply so far, and how much of it is visible."""

    def __init__(self, request: ChatRequest) -> None:
        self._stop = request.stop
        self._show_stop = request.include_stop_str_in_output
        self._hold = 0 if self._show_stop else max((len(stop) for stop in self._stop), default=1) - 1
        self._text = ""
        self._shown = 0

    def add(self, text: str) -> str | None:
        """Append text. Returns the stop string that it completes, at which the text then ends."""
        before = len(self._text)
        self._text += text
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self._text.find(stop, max(before - len(stop) + 1, 0)) if text else -1
            if at >= 0 and (found is None or at + len(stop) < found[0]):
                found = (at + len(stop), stop)
        if found is None:
            return None
        end, stop = found
        self._text = self._text[: end if self._show_stop else end - len(stop)]
        return stop

    def take(self, *, finished: bool) -> str:
        """Return the text that became visible since the last call."""
        end = len(self._text) if finished else max(len(self._text) - self._hold, self._shown)
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return new


def _float32(value: float) -> float:
    """Round to a 32-bit float, as vLLM's log probabilities are."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)
