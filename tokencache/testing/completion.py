"""One chat completion from the prompt's ids to the last event: all its choices, whole or streamed, with the books kept."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokencache.testing import wire
from tokencache.testing.extras import EngineExtras
from tokencache.testing.generation import GenerationStep, LogprobsMode, generate
from tokencache.testing.parser import StreamParser, count_reasoning, parse_reply, reasoning_is_over

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tokencache.testing.books import BookEntry
    from tokencache.testing.chat_request import ChatRequest
    from tokencache.testing.generation import Token
    from tokencache.testing.speech import Speech
    from tokencache.testing.tokenizer import SimTokenizer


@dataclass(slots=True)
class Completion:
    """A completion under way; create it, then run either `whole` or `stream`, once."""

    request: ChatRequest
    prompt_ids: list[int]
    entries: list[BookEntry]
    """One per choice, filled in as tokens are generated."""
    tokenizer: SimTokenizer
    speech: Speech
    max_tokens: int
    call: int
    """Number of this completion among all of the engine's."""
    chunk_tokens: int = 1
    token_delay: float = 0.0
    """Seconds per token."""
    created: int = field(default_factory=lambda: int(time.time()))
    mode: LogprobsMode = "raw_logprobs"
    extras: EngineExtras = field(default_factory=EngineExtras)
    reasoning_parser: bool = True
    halted: Callable[[int], bool] | None = None
    """Asked with the number of tokens so far whether the engine aborts the reply here."""
    versions: dict[int, list[str]] = field(default_factory=dict)
    """Of each choice the weights that sampled each token."""
    keep: Callable[[BookEntry], None] = lambda _: None
    """Told of an entry whenever there is something new in it, before that goes out."""

    def _steps(self, index: int) -> Iterator[GenerationStep]:
        """Generate choice number `index`, each token entered in the books as it comes into being."""
        request, entry = self.request, self.entries[index]
        ids = self.speech.reply(request, self.prompt_ids, self.call, index)
        seed = f"{self.speech.seed}:{self.call}:{index}"
        chunk = max(self.chunk_tokens, request.stream_interval)
        for step in generate(ids, request, self.tokenizer, max_tokens=self.max_tokens, seed=seed, chunk=chunk, mode=self.mode):
            if self.halted is not None and self.halted(len(entry.completion_ids)):
                yield GenerationStep(finish_reason="abort")
                return
            self.versions.setdefault(index, []).extend([self.extras.version] * len(step.ids))
            entry.completion_ids.extend(step.ids)
            entry.logprobs.extend(token.logprob for token in step.tokens)
            entry.stop_reason = step.stop_reason
            self.keep(entry)
            yield step

    def abort(self) -> None:
        """Mark the choices that have not been delivered to the end."""
        for entry in self.entries:
            entry.aborted = True
            if entry.finish_reason is None:
                entry.finish_reason = "abort"
            self.keep(entry)

    def _usage(self, *, whole: bool) -> dict[str, Any]:
        completion = sum(len(entry.completion_ids) for entry in self.entries)
        reasoning = sum(self._reasoning(entry) for entry in self.entries)
        return wire.usage(len(self.prompt_ids), completion, reasoning, whole=whole)

    def _reasoning(self, entry: BookEntry) -> int:
        return count_reasoning(entry.completion_ids, self.tokenizer, thinking=self._thinking)

    @property
    def _thinking(self) -> bool:
        """Whether reasoning is looked for in the text."""
        return self.reasoning_parser and self.request.thinking

    async def whole(self) -> dict[str, Any]:
        """Generate everything; returns the body of the answer."""
        choices = []
        for index, entry in enumerate(self.entries):
            tokens: list[Token] = []
            text, last = "", GenerationStep()
            for step in self._steps(index):
                tokens.extend(step.tokens)
                text += step.text
                last = step
                await asyncio.sleep(self.token_delay * len(step.tokens))
            parsed = parse_reply(text, tools=self.request.parse_tools, thinking=self._thinking)
            choice = wire.whole_choice(self.request, index, parsed, tokens, last)
            entry.finish_reason = choice["finish_reason"]
            self.keep(entry)
            choice["routed_experts"] = self.extras.routed(len(self.prompt_ids) + len(tokens))
            choices.append(choice | self.extras.of_choice(self.request, self.versions.get(index, ())))
        reply = wire.whole_reply(self.request, self.created, choices, self._usage(whole=True), self.prompt_ids)
        return reply | self.extras.of_reply()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the events of the answer, `[DONE]` not among them; choices take turns."""
        request = self.request
        for index in range(request.n):
            yield wire.event(wire.role_chunk(request, self.created, index, self.prompt_ids))
        over = reasoning_is_over(self.prompt_ids, self.tokenizer, thinking=self._thinking)
        parsers = [StreamParser(tools=request.parse_tools, thinking=self._thinking, reasoning_done=over) for _ in self.entries]
        running = [(index, self._steps(index)) for index in range(request.n)]
        while running:
            for index, steps in list(running):
                step = next(steps)
                await asyncio.sleep(self.token_delay * len(step.tokens))
                chunk = self._chunk(index, step, parsers[index])
                if chunk is not None:
                    yield wire.event(chunk)
                if step.finish_reason is not None:
                    running.remove((index, steps))
        if request.include_usage:
            yield wire.event(wire.usage_chunk(request, self.created, self._usage(whole=False)))

    def _chunk(self, index: int, step: GenerationStep, parser: StreamParser) -> dict[str, Any] | None:
        request, entry = self.request, self.entries[index]
        delta = parser.feed(step.text, finished=step.finish_reason is not None)
        named = isinstance(request.body.get("tool_choice"), dict)
        reason = "tool_calls" if parser.called and step.finish_reason == "stop" and not named else step.finish_reason
        entry.finish_reason = reason
        if reason is not None:
            self.keep(entry)
        chunk = wire.delta_chunk(request, self.created, index, delta, step, finish_reason=reason)
        if chunk is not None and reason is not None:
            chunk["choices"][0] |= self.extras.of_choice(request, self.versions.get(index, ()))
        if chunk is not None and request.continuous_usage:
            chunk["usage"] = wire.usage(len(self.prompt_ids), len(entry.completion_ids), self._reasoning(entry))
        return chunk
