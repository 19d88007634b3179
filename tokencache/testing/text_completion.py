"""Text completions (`/v1/completions`): a prompt as text or ids, several at once, and vLLM 0.32's shapes for the answer.

No template, no parsers: what the model says is the text. Unlike a chat's, its ids stand with each choice, the prompt's too
(`completion/protocol.py`), and every step is a chunk, whether or not a text became visible. Generation, limits and stop
conditions are those of a chat; so the request is read as one that has the same settings and no messages.
`echo`, `suffix`, beam search and embeddings are not simulated: they are refused.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tokencache.testing import wire
from tokencache.testing.chat_request import ChatRequest, read_chat_request
from tokencache.testing.extras import EngineExtras
from tokencache.testing.generation import GenerationStep, LogprobsMode, Token, generate
from tokencache.testing.refusals import senseless

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from tokencache.testing.books import BookEntry
    from tokencache.testing.speech import Speech
    from tokencache.testing.tokenizer import SimTokenizer

_DEFAULT_TOKENS = 16
"""vLLM's `max_tokens` where none is given: of completions only."""
_NOT_SIMULATED = ("echo", "suffix", "use_beam_search", "prompt_embeds")


def read_text_request(
    body: dict[str, Any], headers: Mapping[str, str], tokenizer: SimTokenizer, *, served: str
) -> tuple[ChatRequest, list[list[int]]]:
    """Check a body; returns its settings and the ids of its prompts. Raises `Refusal`."""
    for name in _NOT_SIMULATED:
        if body.get(name):
            raise senseless(f"`{name}` is not simulated.", name)
    prompt, wanted = body.get("prompt"), body.get("logprobs")
    if prompt is None or prompt == "":
        raise senseless("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    settings = {name: value for name, value in body.items() if name not in {"prompt", "logprobs"}}
    settings |= {"messages": [], "logprobs": wanted is not None, "top_logprobs": wanted or 0}
    settings.setdefault("max_tokens", _DEFAULT_TOKENS)
    request = read_chat_request(settings, headers, served=served, vocabulary=tokenizer.vocabulary_size)
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts = [tokenizer.encode(one) if isinstance(one, str) else list(one) for one in (prompt if several else [prompt])]
    return replace(request, request_id=request.request_id.replace("chatcmpl-", "cmpl-", 1)), prompts


@dataclass(slots=True)
class TextCompletion:
    """A text completion under way; create it, then run either `whole` or `stream`, once."""

    request: ChatRequest
    prompts: list[list[int]]
    entries: list[BookEntry]
    """One per choice: `n` for each prompt, in order."""
    tokenizer: SimTokenizer
    speech: Speech
    limits: list[int]
    """Tokens that a reply may have, for each prompt."""
    call: int
    chunk_tokens: int = 1
    token_delay: float = 0.0
    created: int = field(default_factory=lambda: int(time.time()))
    mode: LogprobsMode = "raw_logprobs"
    extras: EngineExtras = field(default_factory=EngineExtras)
    versions: dict[int, list[str]] = field(default_factory=dict)
    """Of each choice the weights that sampled each token."""
    keep: Callable[[BookEntry], None] = lambda _: None
    """Told of an entry whenever there is something new in it, before that goes out."""

    def _steps(self, index: int) -> Iterator[GenerationStep]:
        """Generate choice number `index`, each token entered in the books as it comes into being."""
        request, entry, prompt = self.request, self.entries[index], index // self.request.n
        ids = self.speech.reply(request, self.prompts[prompt], self.call, index)
        seed = f"{self.speech.seed}:{self.call}:{index}"
        chunk = max(self.chunk_tokens, request.stream_interval)
        for step in generate(ids, request, self.tokenizer, max_tokens=self.limits[prompt], seed=seed, chunk=chunk, mode=self.mode):
            self.versions.setdefault(index, []).extend([self.extras.version] * len(step.ids))
            entry.completion_ids.extend(step.ids)
            entry.logprobs.extend(token.logprob for token in step.tokens)
            entry.finish_reason, entry.stop_reason = step.finish_reason, step.stop_reason
            self.keep(entry)
            yield step

    def abort(self) -> None:
        """Mark the choices that have not been delivered to the end."""
        for entry in self.entries:
            entry.aborted = True
            entry.finish_reason = entry.finish_reason or "abort"
            self.keep(entry)

    def _usage(self) -> dict[str, Any]:
        prompt, completion = sum(map(len, self.prompts)), sum(len(entry.completion_ids) for entry in self.entries)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    async def whole(self) -> dict[str, Any]:
        """Generate everything; returns the body of the answer."""
        choices = []
        for index in range(len(self.entries)):
            tokens: list[Token] = []
            text, last = "", GenerationStep()
            for step in self._steps(index):
                tokens.extend(step.tokens)
                text, last = text + step.text, step
                await asyncio.sleep(self.token_delay * len(step.tokens))
            choices.append(self._choice(index, text, tokens, last) | self.extras.of_choice(self.request, self.versions[index]))
        return {
            "id": self.request.request_id, "object": "text_completion", "created": self.created, "model": self.request.model,
            "choices": choices, "service_tier": None, "system_fingerprint": wire.FINGERPRINT,
            "usage": {**self._usage(), "prompt_tokens_details": None, "completion_tokens_details": None},
            "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None, **self.extras.of_reply(),
        }  # fmt: skip

    def _choice(self, index: int, text: str, tokens: Sequence[Token], last: GenerationStep) -> dict[str, Any]:
        request = self.request
        return {
            "index": index, "text": text, "logprobs": self._logprobs(tokens, 0), "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason, "token_ids": [token.id for token in tokens] if request.return_token_ids else None,
            "prompt_logprobs": None, "prompt_token_ids": self.prompts[index // request.n] if request.return_token_ids else None,
            "routed_experts": self.extras.routed(len(self.prompts[index // request.n]) + len(tokens)),
        }  # fmt: skip

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        """Return the `logprobs` of a choice or chunk; `offset` is how many characters of tokens came before."""
        if not self.request.logprobs:
            return None
        offsets, place = [], offset
        for token in tokens:
            offsets.append(place)
            place += len(token.text)
        neighbours = range(1, self.request.top_logprobs + 1)
        top = [{token.text: token.logprob} | {f"~{i}": token.neighbour(i) for i in neighbours} for token in tokens]
        chances = [token.logprob for token in tokens]
        return {"text_offset": offsets, "token_logprobs": chances, "tokens": [token.text for token in tokens], "top_logprobs": top}

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the events of the answer, `[DONE]` not among them; choices take turns."""
        running = [(index, self._steps(index)) for index in range(len(self.entries))]
        offsets = [0] * len(self.entries)
        first = set(range(len(self.entries)))
        while running:
            for index, steps in list(running):
                step = next(steps)
                await asyncio.sleep(self.token_delay * len(step.tokens))
                yield wire.event(self._chunk(index, step, offsets[index], first=index in first))
                first.discard(index)
                offsets[index] += sum(len(token.text) for token in step.tokens)
                if step.finish_reason is not None:
                    running.remove((index, steps))
        if self.request.include_usage:
            yield wire.event(self._head([]) | {"usage": self._usage(), "system_fingerprint": wire.FINGERPRINT})

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        request = self.request
        return {
            "id": request.request_id, "object": "text_completion", "created": self.created, "model": request.model, "choices": choices,
        }  # fmt: skip

    def _chunk(self, index: int, step: GenerationStep, offset: int, *, first: bool) -> dict[str, Any]:
        request, shows = self.request, self.request.return_token_ids
        choice = {
            "index": index, "text": step.text, "logprobs": self._logprobs(step.tokens, offset), "finish_reason": step.finish_reason,
            "stop_reason": step.stop_reason, "prompt_token_ids": self.prompts[index // request.n] if shows and first else None,
            "token_ids": step.ids if shows else None,
        }  # fmt: skip
        if step.finish_reason is not None:
            choice |= self.extras.of_choice(request, self.versions[index])
        chunk = self._head([choice])
        if step.finish_reason is not None and not request.include_usage:
            chunk["system_fingerprint"] = wire.FINGERPRINT
        if request.continuous_usage:
            prompt, said = len(self.prompts[index // request.n]), len(self.entries[index].completion_ids)
            chunk["usage"] = {"prompt_tokens": prompt, "total_tokens": prompt + said, "completion_tokens": said}
        return chunk
