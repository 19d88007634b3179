"""Generates the completions of the simulated engine, from the prompt's ids to the last event: chat or text, whole or streamed.

A text completion (`/v1/completions`) has one or several prompts, as text or ids. It has no template and no parsers: the reply is the text.
As in vLLM 0.32 (`completion/protocol.py`) each choice contains its ids and those of its prompt, and every step is a chunk, even without
visible text. `prompt_logprobs` has the values of the model's own distribution under the present weights. `echo`, `suffix`, beam search and
embeddings are refused.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokencache.testing import wire
from tokencache.testing.chat_request import ChatRequest, read_chat_request
from tokencache.testing.dev_mode import DevMode
from tokencache.testing.errors import senseless
from tokencache.testing.generation import GenerationStep, LogprobsMode, Token, generate, prompt_token, within_budget
from tokencache.testing.ground_truth import GroundTruthEntry, GroundTruthLog
from tokencache.testing.parser import StreamParser, count_reasoning, parse_reply, reasoning_is_over
from tokencache.testing.replies import ReplyGenerator
from tokencache.testing.tokenizer import SimTokenizer
from tokencache.testing.weights import KeysAndValues, SimulatedWeights

_DEFAULT_TOKENS = 16
"""vLLM's default of `max_tokens` for text completions."""
_NOT_SIMULATED = ("echo", "suffix", "use_beam_search", "prompt_embeds")


@dataclass(slots=True, kw_only=True)
class CompletionSettings:
    """Settings of the engine that all its completions share (`SimulatedEngine`). `log` receives every token before it is sent."""

    tokenizer: SimTokenizer
    replies: ReplyGenerator
    weights: SimulatedWeights
    dev_mode: DevMode
    chunk_tokens: int
    token_delay: float
    logprobs_mode: LogprobsMode
    reasoning_parser: bool
    reads_earlier_thoughts: bool
    log: GroundTruthLog | None


@dataclass(slots=True)
class Completion:
    """A completion in progress. Call either `whole` or `stream`, once.

    Attributes:
        prompts: ids of each prompt; a chat completion has one.
        limits: largest number of tokens in a reply, for each prompt.
        entries: ground truth of each choice: `n` for each prompt, in order. They grow while tokens are generated.
        call: number of this completion among all of the engine.
        halted: receives the number of tokens so far; returns whether the engine aborts the reply there.
        queued: whether it arrived while the engine was paused, and waits since.
        created: Unix time in seconds.
    """

    request: ChatRequest
    prompts: list[list[int]]
    limits: list[int]
    entries: list[GroundTruthEntry]
    call: int
    settings: CompletionSettings
    halted: Callable[[int], bool] = lambda _tokens: False
    queued: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    headers: dict[str, str] = field(default_factory=dict)

    async def whole(self) -> dict[str, Any]:
        """Generate everything. Returns the body of the reply."""
        raise NotImplementedError

    def stream(self) -> AsyncIterator[bytes]:
        """Yield the events of the reply, without `[DONE]`. Choices take turns."""
        raise NotImplementedError

    def abort(self) -> None:
        """Mark the choices as not delivered completely."""
        for entry in self.entries:
            entry.aborted = True
            entry.finish_reason = entry.finish_reason or "abort"
            self._log(entry)

    def _log(self, entry: GroundTruthEntry) -> None:
        if self.settings.log is not None:
            self.settings.log.append(entry)

    def _prompt(self, index: int) -> list[int]:
        return self.prompts[index // self.request.n]

    def _finish(self, entry: GroundTruthEntry, reason: str | None) -> None:
        entry.finish_reason = reason
        if reason is not None:
            self._log(entry)

    def _steps(self, index: int) -> Iterator[GenerationStep]:
        """Generate choice number `index`. Each token is in the ground truth before it is sent."""
        request, settings, entry = self.request, self.settings, self.entries[index]
        ids = settings.replies.reply(request, self._prompt(index), self.call, index, self._bound_at_once(index))
        budget = request.body.get("thinking_token_budget")
        if settings.reasoning_parser and budget is not None and budget >= 0:
            ids = within_budget(ids, self._prompt(index), budget, settings.tokenizer)
        kv = self._keys_and_values(index)
        rng = random.Random(settings.replies.logprobs_seed(self._prompt(index), self.call, index))
        chance = kv.chance if kv is not None else lambda _token: rng.random()
        chunk = max(settings.chunk_tokens, request.stream_interval)
        limit, mode = self.limits[index // request.n], settings.logprobs_mode
        for step in generate(
            ids, request, settings.tokenizer, max_tokens=limit, chance=chance, first=settings.chunk_tokens, chunk=chunk,
            halted=self.halted, mode=mode, eos=settings.replies.eos,
        ):  # fmt: skip
            if self.halted(len(entry.completion_ids)):
                yield GenerationStep(finish_reason="abort")
                return
            entry.completion_ids.extend(step.ids)
            entry.logprobs.extend(token.logprob for token in step.tokens)
            if kv is not None:
                entry.versions = kv.sampled[: len(entry.completion_ids)]
            entry.stop_reason = step.stop_reason
            self._log(entry)
            yield step

    def _bound_at_once(self, index: int) -> Sequence[str]:
        """Return the texts of a `choice`, if that grammar binds the reply from its first token. No other grammar is simulated."""
        request, settings = self.request, self.settings
        choice: Sequence[str] = (request.body.get("structured_outputs") or {}).get("choice") or ()
        anywhere = settings.reads_earlier_thoughts
        thinks = settings.reasoning_parser and request.thinking and request.include_reasoning
        return () if thinks and not reasoning_is_over(self._prompt(index), settings.tokenizer, thinking=True, anywhere=anywhere) else choice

    def _keys_and_values(self, index: int) -> KeysAndValues | None:
        """Compute the prompt of a choice; `None` if the engine's weights have no name."""
        weights, prompt = self.settings.weights, self._prompt(index)
        if not weights.of(self.request.model):
            return None
        reads_cache = self.request.body.get("prompt_logprobs") is None
        kv = weights.begin(self.request.model, str(self.request.body.get("cache_salt") or ""), prompt, reads_cache=reads_cache)
        self.entries[index].prompt_versions, self.entries[index].cached = kv.versions, kv.cached
        return kv

    async def _next(self, index: int, steps: Iterator[GenerationStep]) -> GenerationStep | None:
        """Return the next step of a choice, when the engine is not paused; `None` after the last."""
        dev_mode = self.settings.dev_mode
        while dev_mode.holds(queued=self.queued) and not self.halted(len(self.entries[index].completion_ids)):
            await dev_mode.change()
        self.queued = False
        step = next(steps, None)
        if step is not None:
            await asyncio.sleep(self.settings.token_delay * len(step.tokens))
        return step

    async def _all_steps(self, index: int) -> tuple[str, list[Token], GenerationStep]:
        """Generate a whole choice: its text, its tokens and its last step."""
        tokens: list[Token] = []
        text, last = "", GenerationStep()
        steps = self._steps(index)
        while (step := await self._next(index, steps)) is not None:
            tokens.extend(step.tokens)
            text, last = text + step.text, step
        return text, tokens, last

    async def _interleaved_steps(self) -> AsyncIterator[tuple[int, GenerationStep]]:
        """Generate all choices, one step of each in turn."""
        running = [(index, self._steps(index)) for index in range(len(self.entries))]
        while running:
            for index, steps in list(running):
                step = await self._next(index, steps)
                assert step is not None  # noqa: S101 - a choice that has ended is no longer running
                yield index, step
                if step.finish_reason is not None:
                    running.remove((index, steps))


@dataclass(slots=True)
class ChatCompletion(Completion):
    """A chat completion in progress."""

    prompt_text: str | None = None
    """The text of the prompt, if the request wants it."""

    def _usage(self, *, whole: bool) -> dict[str, Any]:
        completion = sum(len(entry.completion_ids) for entry in self.entries)
        reasoning = sum(self._reasoning(entry) for entry in self.entries)
        return wire.usage(len(self.prompts[0]), completion, reasoning, whole=whole)

    def _reasoning(self, entry: GroundTruthEntry) -> int:
        return count_reasoning(entry.completion_ids, self.settings.tokenizer, thinking=self._thinking)

    @property
    def _thinking(self) -> bool:
        """Whether the parser looks for reasoning in the text."""
        return self.settings.reasoning_parser and self.request.thinking

    async def whole(self) -> dict[str, Any]:
        """See `Completion.whole`."""
        choices = []
        for index, entry in enumerate(self.entries):
            text, tokens, last = await self._all_steps(index)
            parsed = parse_reply(text, tools=self.request.parse_tools, thinking=self._thinking)
            choice = wire.whole_choice(self.request, index, parsed, tokens, last)
            self._finish(entry, choice["finish_reason"])
            choices.append(choice)
        reply = wire.whole_reply(self.request, self.created, choices, self._usage(whole=True), self.prompts[0])
        return reply | {"prompt_text": self.prompt_text}

    async def stream(self) -> AsyncIterator[bytes]:
        """See `Completion.stream`."""
        request = self.request
        for index in range(request.n):
            yield wire.event(self._first_chunk(index))
        settings = self.settings
        over = reasoning_is_over(self.prompts[0], settings.tokenizer, thinking=self._thinking, anywhere=settings.reads_earlier_thoughts)
        parsers = [StreamParser(tools=request.parse_tools, thinking=self._thinking, reasoning_done=over) for _ in self.entries]
        async for index, step in self._interleaved_steps():
            chunk = self._chunk(index, step, parsers[index])
            if chunk is not None:
                yield wire.event(chunk)
        if request.include_usage:
            yield wire.event(wire.usage_chunk(request, self.created, self._usage(whole=False)))

    def _first_chunk(self, index: int) -> dict[str, Any]:
        return wire.role_chunk(self.request, self.created, index, self.prompts[0]) | {"prompt_text": self.prompt_text}

    def _chunk(self, index: int, step: GenerationStep, parser: StreamParser) -> dict[str, Any] | None:
        request, entry = self.request, self.entries[index]
        delta = parser.feed(step.text, finished=step.finish_reason is not None)
        named = isinstance(request.body.get("tool_choice"), dict)
        reason = "tool_calls" if parser.called and step.finish_reason == "stop" and not named else step.finish_reason
        self._finish(entry, reason)
        chunk = wire.delta_chunk(request, self.created, index, delta, step, finish_reason=reason)
        if chunk is not None and request.continuous_usage:
            chunk["usage"] = wire.usage(len(self.prompts[0]), len(entry.completion_ids), self._reasoning(entry))
        return chunk


def read_text_request(
    body: dict[str, Any], headers: Mapping[str, str], tokenizer: SimTokenizer, *, served: str
) -> tuple[ChatRequest, list[list[int]]]:
    """Check the body of a text completion. Returns its settings, as a chat request without messages, and the ids of its prompts.

    Raises:
        RefusalResponse: vLLM would refuse the request, or it uses a feature that is not simulated.
    """
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
class TextCompletion(Completion):
    """A text completion in progress."""

    def _usage(self) -> dict[str, Any]:
        prompt, completion = sum(map(len, self.prompts)), sum(len(entry.completion_ids) for entry in self.entries)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    async def whole(self) -> dict[str, Any]:
        """See `Completion.whole`."""
        choices = []
        for index, entry in enumerate(self.entries):
            text, tokens, last = await self._all_steps(index)
            self._finish(entry, last.finish_reason)
            choices.append(self._choice(index, text, tokens, last))
        return {
            **self._head(choices), "service_tier": None, "system_fingerprint": wire.FINGERPRINT,
            "usage": {**self._usage(), "prompt_tokens_details": None, "completion_tokens_details": None},
            "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None,
        }  # fmt: skip

    def _choice(self, index: int, text: str, tokens: Sequence[Token], last: GenerationStep) -> dict[str, Any]:
        shows, prompt = self.request.return_token_ids, self._prompt(index)
        return {
            "index": index, "text": text, "logprobs": self._logprobs(tokens, 0), "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason, "token_ids": [token.id for token in tokens] if shows else None,
            "prompt_logprobs": self._prompt_logprobs(prompt), "prompt_token_ids": prompt if shows else None,
            "routed_experts": None,
        }  # fmt: skip

    def _prompt_logprobs(self, prompt: list[int]) -> list[dict[str, Any] | None] | None:
        """Return the log probability of each token of the prompt, with `prompt_logprobs` made-up neighbours; the first token has none.

        They are those of the engine's present weights: the prefix cache is not read.
        """
        wanted, settings = self.request.body.get("prompt_logprobs"), self.settings
        if wanted is None:
            return None
        found: list[dict[str, Any] | None] = [None]
        kv = settings.weights.begin(self.request.model, str(self.request.body.get("cache_salt") or ""), prompt, reads_cache=False)
        for token_id, chance in zip(prompt[1:], kv.prompt_chances(), strict=True):
            token = prompt_token(token_id, settings.tokenizer.token(token_id), chance, settings.logprobs_mode)
            entries = {str(token_id): {"logprob": token.logprob, "rank": 1, "decoded_token": token.text}}
            for i in range(1, wanted):
                other = (token_id + i) % settings.tokenizer.vocabulary_size
                entries[str(other)] = {"logprob": token.neighbour(i), "rank": i + 1, "decoded_token": settings.tokenizer.token(other)}
            found.append(entries)
        return found

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        """Return the `logprobs` of a choice or chunk. `offset` is the number of characters of the tokens before."""
        if not self.request.logprobs:
            return None
        offsets, at = [], offset
        for token in tokens:
            offsets.append(at)
            at += len(token.text)
        neighbours = range(1, self.request.top_logprobs + 1)
        top = [{token.text: token.logprob} | {f"~{i}": token.neighbour(i) for i in neighbours} for token in tokens]
        values = [token.logprob for token in tokens]
        return {"text_offset": offsets, "token_logprobs": values, "tokens": [token.text for token in tokens], "top_logprobs": top}

    async def stream(self) -> AsyncIterator[bytes]:
        """See `Completion.stream`."""
        offsets = [0] * len(self.entries)
        first = set(range(len(self.entries)))
        async for index, step in self._interleaved_steps():
            self._finish(self.entries[index], step.finish_reason)
            yield wire.event(self._chunk(index, step, offsets[index], first=index in first))
            first.discard(index)
            offsets[index] += sum(len(token.text) for token in step.tokens)
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
            "stop_reason": step.stop_reason, "prompt_token_ids": self._prompt(index) if shows and first else None,
            "token_ids": step.ids if shows else None,
        }  # fmt: skip
        chunk = self._head([choice])
        if step.finish_reason is not None and not request.include_usage:
            chunk["system_fingerprint"] = wire.FINGERPRINT
        if request.continuous_usage:
            prompt, sampled = len(self._prompt(index)), len(self.entries[index].completion_ids)
            chunk["usage"] = {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}
        return chunk
