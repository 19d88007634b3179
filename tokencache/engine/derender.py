"""Makes messages from sampled token ids with vLLM's own parsers: the route `/v1/chat/completions/derender`.

The route exists in vLLM 0.24 and later; since 0.30 it needs `--enable-scale-out`. A `vllm launch render` sidecar (`--derender`) always
has it.

It also works piece by piece (vLLM 0.31): each request brings new ids and the state that the last answer returned, and gets the next delta
of the message. vLLM reads all earlier ids again each time, so ask for many at once: 38 ms for 1,000 earlier tokens, 270 ms for 3,500 (vLLM
0.32, two cores).
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from tokencache.dialects.completion_reader import ReplyMessage
from tokencache.dialects.json_io import NULL, TRUE
from tokencache.dialects.members import OF_STREAMS
from tokencache.engine.upstream import EngineClient, EngineResponse, Upstream
from tokencache.errors import EngineError

Raw = msgspec.Raw

DERENDER = "/v1/chat/completions/derender"
RENDER = "/v1/chat/completions/render"
ANY_MESSAGES = Raw(b'[{"role":"user","content":"Hello."}]')
"""Messages in place of those of a request, where they do not matter: parsers read only the other members, and the ids of the prompt."""


class DerenderRequest(NamedTuple):
    """What a message is made for.

    Attributes:
        engine: the engine, unless a sidecar answers.
        fields: the members of the chat request, raw.
        prompt: the raw JSON list of the prompt's ids, without the reply's.
        headers: headers for the engine; `None` for a request that the proxy itself makes.
    """

    engine: EngineClient
    fields: Mapping[str, Raw]
    prompt: bytes
    headers: Mapping[str, str] | None = None


class _StreamChoice(msgspec.Struct):
    delta: ReplyMessage = msgspec.field(default_factory=ReplyMessage)
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] = []


class _Streamed(msgspec.Struct):
    chunk: _Chunk
    stream_state: Raw = NULL


class _Sampling(msgspec.Struct):
    max_tokens: int | None = None


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    sampling_params: _Sampling


class _WholeChoice(msgspec.Struct):
    index: int
    message: dict[str, Any]


class _Whole(msgspec.Struct):
    choices: list[_WholeChoice]


class Derender:
    """Asks for messages. `sidecar` answers, or the request's engine if there is none."""

    def __init__(self, sidecar: Upstream | None = None) -> None:
        self._sidecar = sidecar

    async def messages(self, request: DerenderRequest, choices: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Make whole messages. Each choice has `index`, `token_ids` (at least one) and `finish_reason`. Returns messages by index.

        Raises:
            EngineError: the route cannot be reached, or refuses.
        """
        prompt = Raw(request.prompt or b"null")
        body = {
            "generate_response": {"request_id": "derender", "choices": choices, "prompt_token_ids": prompt},
            **self._common(request, prompt),
        }
        answer = await self._post(request, body)
        try:
            made = {choice.index: choice.message for choice in msgspec.json.decode(answer.body, type=_Whole).choices}
        except (ValueError, RecursionError) as why:
            raise EngineError(f"{DERENDER} returned no messages: {why}; the tokens are recorded") from why
        if made.keys() != {choice["index"] for choice in choices}:
            raise EngineError(f"{DERENDER} did not return a message for each choice; the tokens are recorded")
        return made

    async def delta(
        self, request: DerenderRequest, state: Raw, new: Sequence[int], finish_reason: str | None = None
    ) -> tuple[ReplyMessage, str | None, Raw]:
        """Make the next delta of a message.

        Args:
            request: what the message is made for.
            state: what the last answer returned; `null` at first.
            new: the next sampled ids.
            finish_reason: with the last ids, otherwise `None`.

        Returns:
            The delta, the finish reason that belongs to the message (`tool_calls` for `stop` after a call), and the next state.

        Raises:
            EngineError: the route cannot be reached, or refuses.
        """
        chunk = {"request_id": "derender", "choices": [{"index": 0, "token_ids": list(new), "finish_reason": finish_reason}]}
        body = {"stream": TRUE, "stream_state": state, "generate_chunk": chunk, **self._common(request, Raw(request.prompt))}
        answer = await self._post(request, body)
        try:
            made = msgspec.json.decode(answer.body, type=_Streamed)
        except (ValueError, RecursionError) as why:
            raise EngineError(f"{DERENDER} returned no delta: {why}; the tokens are recorded") from why
        choice = made.chunk.choices[0] if made.chunk.choices else _StreamChoice()
        return choice.delta, choice.finish_reason, made.stream_state

    async def default_limit(self, request: DerenderRequest, max_model_len: int) -> int:
        """Return the engine's own limit for a reply to a request without one, in tokens; 0 if only the context limits it.

        `/v1/chat/completions/render` reports it: an engine may have a limit of its own (`--override-generation-config`).

        Raises:
            EngineError: the route cannot be reached, or does not report the limit.
        """
        body = {"model": request.fields.get("model", NULL), "messages": ANY_MESSAGES}
        try:
            found = msgspec.json.decode((await self._post(request, body, RENDER)).body, type=_Rendered)
        except (ValueError, RecursionError) as why:
            raise EngineError(f"{RENDER} does not report the engine's limit for replies: {why}") from why
        limit = found.sampling_params.max_tokens
        return 0 if limit is None or limit + len(found.token_ids) >= max_model_len else limit

    async def streams(self, engine: EngineClient, model: str, prompt: Sequence[int]) -> bool:
        """Test whether the route makes deltas and whole messages, with ids of a prompt.

        Raises:
            EngineError: the engine did not answer, or cannot answer now.
        """
        fields = {"model": Raw(msgspec.json.encode(model)), "messages": ANY_MESSAGES}
        request, tokens = DerenderRequest(engine, fields, msgspec.json.encode(prompt)), prompt[:2]
        try:
            _, _, state = await self.delta(request, NULL, tokens[:1])
            await self.delta(request, state, tokens[1:], "length")
            await self.messages(request, [{"index": 0, "token_ids": list(tokens), "finish_reason": "length"}])
        except EngineError as why:
            if why.passing:
                raise
            return False
        return True

    @staticmethod
    def _common(request: DerenderRequest, prompt: Raw) -> dict[str, Any]:
        fields = {name: value for name, value in request.fields.items() if name not in OF_STREAMS}
        return {
            "model": fields.get("model", NULL),
            "prompt_token_ids": prompt,
            "chat_request": fields | {"include_reasoning": TRUE},  # without it vLLM returns no reasoning
        }

    async def _post(self, request: DerenderRequest, body: Mapping[str, Any], path: str = DERENDER) -> EngineResponse:
        """Post to the sidecar, or to the engine; only the engine gets the harness's own headers.

        Raises:
            EngineError: the route cannot be reached, or refuses.
        """
        encoded = msgspec.json.encode(body)
        if self._sidecar is None:
            answer = await request.engine.query(path, encoded, request.headers)
        else:
            answer = await self._sidecar.query(path, encoded)
        if answer.status != HTTPStatus.OK:
            words = answer.body[:300].decode(errors="replace")
            raise EngineError(f"{path} answered {answer.status}: {words}; the tokens are recorded", status=answer.status)
        return answer
