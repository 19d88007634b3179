"""Drives the frontend of NVIDIA's Dynamo (ai-dynamo 1.6.1), with workers of vLLM, SGLang or TensorRT-LLM.

`nvext.token_data` in a chat completion is the prompt. The frontend still renders the messages: their rendering says whether the prompt
has opened the reply's thought, which its reasoning parser must know. So a request has both. The ids of a reply are in
`nvext.completion_token_ids`, in a stream those of each chunk.

*Rendering.* With the annotation `query_instance_id:` the frontend answers with the ids of the prompt and samples nothing. That needs
`--router-mode kv`. In other modes it samples, so these requests ask for one token, and for the ids of the prompt with it.

*A late echo.* A stream has the ids of the prompt only in its last chunk. A client may leave before, or a worker may die. So a streamed
call without an exact prompt is rendered first, and all streams have exact ids. The frontend refuses ids that it cannot use, and each chunk
has the number of tokens in the prompt: if it is that of the ids that were sent, the prompt is proven without the echo.

*Workers* register some seconds after the frontend answers, and leave it when they die. A frontend that has no model answers 404 to model
calls, and its list of models is empty: calls wait.

*Sessions.* `X-Dynamo-Session-ID` pins a session to a worker (`--router-session-affinity-ttl-secs`), and is the session's name, whatever a
harness sends. All calls of a session have it, so those of sub-agents go to the same worker. `X-Dynamo-Parent-Session-ID` is not sent: with
it, calls of the children of one parent went to one worker, but not to the parent's.
"""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from multidict import CIMultiDict

from tokencache.core import ids
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.whole import whole_members
from tokencache.dialects.json_io import FIELDS, NULL, OBJECTS, value_of
from tokencache.dialects.sse import DONE, EventSplitter, data_of, event_of
from tokencache.dialects.stream_usage import requests_continuous_usage, with_continuous_usage
from tokencache.engine.derender import ANY_MESSAGES
from tokencache.engine.drivers.base import CHAT, Driver, EngineRequest, ExactPrompt, StreamChunk, Target
from tokencache.engine.drivers.vllm import binds_late, members_with_ids
from tokencache.engine.template.renderer import EngineRenderer, RenderError
from tokencache.engine.upstream import EngineClient, EngineResponse
from tokencache.errors import NOT_NOW, OK, EngineError

Raw = msgspec.Raw

COMPLETIONS = "/v1/completions"
_SESSION, _PARENT, _FINAL = "X-Dynamo-Session-ID", "X-Dynamo-Parent-Session-ID", "X-Dynamo-Session-Final"
_OF_SESSIONS = (_SESSION, _PARENT, _FINAL)
_EXTENSION, _SAMPLED, _PROMPT = "nvext", "completion_token_ids", "prompt_token_ids"
_RENDERS = "query_instance_id:"
_UNKNOWN = frozenset({"return_token_ids", "return_weight_versions", "include_reasoning"})
"""Members of vLLM's that the frontend refuses, and that only say what the reply contains."""
_LIMITS = ("max_tokens", "max_completion_tokens")
_MIGRATED = re.compile(rb"^\w*_model_migration_total\{[^}\n]*\} ([0-9.]+)", re.MULTILINE)
"""Counts the requests that moved to another worker. The metric `model_migration_limit` is not the limit of the frontend's option."""
_ENABLE_RL = (
    "start vLLM workers with --enable-rl, which cannot be checked here: without it they apply the defaults of generation_config.json "
    "(top_k and more) to exact prompts"
)
_NO_MIGRATION = (
    "start the frontend with --migration-limit 0, which cannot be checked here: with another limit, the reply of a worker that dies is "
    "continued by another one, unseen"
)


class DynamoRenderer(EngineRenderer):
    """The frontend's own rendering. It has no route that decodes ids. Without a worker it answers 404."""

    not_now = NOT_NOW | {HTTPStatus.NOT_FOUND}

    async def render(self, model: str, messages: Any, args: RenderArgs, *, generation: bool) -> bytes:
        """See `Renderer.render`."""
        body: dict[str, Any] = {**args.members, "messages": Raw(b"[" + b",".join(messages) + b"]"), "add_generation_prompt": generation}
        if args.kwargs:
            body["chat_template_kwargs"] = args.kwargs
        if args.tools is not None:
            body["tools"] = args.tools
        try:
            answer = await self._engine.query(CHAT, rendering({**body, "model": model}))
        except Exception as why:
            raise RenderError(str(why)) from why
        if answer.status != OK:
            self.refuse(answer, "the frontend")
        if (found := rendered_ids(answer.body)) is None:
            raise RenderError(f"the frontend returned no token ids for {_RENDERS}")
        return found

    async def encode(self, model: str | Raw, text: str | Raw, headers: Mapping[str, str] | None = None) -> list[int]:
        """See `EngineRenderer.encode`."""
        answer = await self._engine.query(COMPLETIONS, rendering({"model": model, "prompt": text}), headers)
        if answer.status in NOT_NOW:
            raise EngineError(f"{COMPLETIONS} answered {answer.status}", status=answer.status)
        return ids.unpack(rendered_ids(answer.body) or b"") if answer.status == OK else []

    async def read(self, model: str, packed: bytes) -> str:
        """See `TextRenderer.read`.

        Raises:
            RenderError: always.
        """
        del model, packed
        raise RenderError("Dynamo's frontend decodes no ids")


class Dynamo(Driver):
    """The driver `dynamo`."""

    name = "dynamo"
    how = "nvext.token_data is the prompt"
    renderer = DynamoRenderer
    limit_member = "context_window"
    names_sessions = True

    async def request(self, call: ChatCall, prompt: ExactPrompt | None, target: Target) -> EngineRequest:
        """See `Driver.request`."""
        sent = None
        if prompt is None and call.stream and not call.media:
            sent = await self._rendered(call, target)
        fragment = prompt.fragment if prompt is not None else sent
        reads = StreamReader(hides_usage=not requests_continuous_usage(call.fields))
        body = _written(call, fragment)
        return EngineRequest(target.path, body, read_chunk=reads, sent=sent, counted=fragment is not None, late_grammar=binds_late(call))

    async def _rendered(self, call: ChatCall, target: Target) -> ids.Fragment | None:
        """Have the prompt of a call rendered; `None` if the frontend does not render it, as it will say in answer to the call itself."""
        fields = {name: raw for name, raw in whole_members(call.fields).items() if name not in {*_UNKNOWN, *_LIMITS, "n", "priority"}}
        try:
            answer = await target.upstream.query(CHAT, rendering(fields), _without_session(target.headers))
        except EngineError:
            return None
        packed = rendered_ids(answer.body) if answer.status == OK else None
        return ids.Fragment.of(packed) if packed else None

    def write(self, call: ChatCall, prompt: ExactPrompt | None) -> bytes:
        """See `Driver.write`."""
        return _written(call, prompt.fragment if prompt is not None else None)

    def text_request(self, path: str, body: bytes) -> EngineRequest:
        """See `Driver.text_request`."""
        fields = FIELDS.decode(body)
        reads = StreamReader(hides_usage=not requests_continuous_usage(fields))
        return EngineRequest(path, msgspec.json.encode(_for_frontend(fields)), read_chunk=reads)

    def read(self, body: bytes) -> bytes:
        """See `Driver.read`."""
        return StreamReader(hides_usage=False)(body).data

    def own_request(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Driver.own_request`."""
        raw = {name: Raw(msgspec.json.encode(value)) for name, value in body.items()}
        return _for_frontend(raw)

    async def ask(self, upstream: EngineClient, body: Mapping[str, Any]) -> EngineResponse:
        """See `Driver.ask`; reads streams, too."""
        answer = await super().ask(upstream, body)
        if answer.status != OK or not body.get("stream"):
            return answer
        chunks = [data_of(event) for event in EventSplitter().feed(answer.body)]
        reads = StreamReader(hides_usage=False)
        read = [data if data == DONE else reads(data).data for data in chunks if data is not None]
        return msgspec.structs.replace(answer, body=b"".join(map(event_of, read)))

    def probe_members(self, question: bytes, reply: bytes, prompt: list[int]) -> dict[str, Any]:
        """See `Driver.probe_members`."""
        del reply
        return {"messages": [Raw(question)], _EXTENSION: {"token_data": prompt}}

    def name_session(self, headers: CIMultiDict[str], session: str) -> None:
        """See `Driver.name_session`. The headers of a harness neither move its session nor end another one."""
        for name in _OF_SESSIONS:
            headers.popall(name, None)
        headers[_SESSION] = session

    async def end_session(self, engine: EngineClient, session: str, model: str) -> int:
        """See `Driver.end_session`. The request samples nothing."""
        asked = rendering({"model": model, "messages": ANY_MESSAGES})
        return (await engine.post(CHAT, asked, {_SESSION: session, _FINAL: "true"})).status

    async def refuses_for_now(self, engine: EngineClient, status: int, path: str, model: str) -> bool:
        """See `Driver.refuses_for_now`. If the frontend lists the model by now, a worker has registered meanwhile."""
        if status != HTTPStatus.NOT_FOUND:
            return False
        try:
            listed = msgspec.json.decode((await engine.get("/v1/models")).body, type=_Models).data
        except ValueError:
            return False
        return not listed or (path == CHAT and (not model or any(one.id == model for one in listed)))

    async def cautions(self, engine: EngineClient, model: str) -> tuple[str, ...]:
        """See `Driver.cautions`."""
        del model
        counts = [float(count) for count in _MIGRATED.findall((await engine.get("/metrics")).body)]
        migrated = f"; it has moved {sum(counts):g} requests" if any(counts) else ""
        return _ENABLE_RL, _NO_MIGRATION + migrated


def _without_session(headers: CIMultiDict[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in {own.lower() for own in _OF_SESSIONS})


def rendering(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a request that renders its prompt and samples one token at most."""
    own = fields.get(_EXTENSION)
    others = FIELDS.decode(own) if isinstance(own, Raw) and bytes(own) != b"null" else {}
    return {**fields, "max_tokens": 1, _EXTENSION: {**others, "annotations": [_RENDERS], "extra_fields": [_PROMPT]}}


def rendered_ids(body: bytes) -> bytes | None:
    """Return the packed ids in the answer to a `rendering`; `None` if it has none."""
    try:
        found = msgspec.json.decode(body, type=_Rendered).nvext
        listed = found.token_ids if found.token_ids is not None else found.prompt_token_ids
        return ids.pack(listed) if listed is not None else None
    except (ValueError, OverflowError):
        return None


class _Extension(msgspec.Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Rendered(msgspec.Struct):
    nvext: _Extension


def _written(call: ChatCall, prompt: ids.Fragment | None) -> bytes:
    fields = members_with_ids(call)
    if prompt is not None and call.malformed:
        fields["messages"] = Raw(b"[" + b",".join(call.safe_messages()) + b"]")
    return msgspec.json.encode(_for_frontend(fields, prompt))


def _for_frontend(fields: Mapping[str, Raw], prompt: ids.Fragment | None = None) -> dict[str, Any]:
    """Return the members for the frontend of a request for vLLM that asks for ids, with the ids of its prompt."""
    kept: dict[str, Any] = {name: raw for name, raw in fields.items() if name not in _UNKNOWN}
    given = kept.pop(_EXTENSION, NULL)
    extension: dict[str, Any] = FIELDS.decode(given) if bytes(given) != b"null" else {}
    if (priority := value_of(kept.pop("priority", NULL))) is not None:
        hints = FIELDS.decode(extension.get("agent_hints", Raw(b"{}")))
        extension["agent_hints"] = {"priority": -priority, **hints}  # vLLM: lower first; the frontend: higher first
    if value_of(fields.get("n", NULL)) in {None, 1}:  # otherwise it refuses to report ids
        wanted = value_of(extension.get("extra_fields", NULL)) or []
        extension["extra_fields"] = list(dict.fromkeys([*wanted, _SAMPLED, _PROMPT]))
    if prompt is not None:
        extension["token_data"] = Raw(b"[" + bytes(prompt) + b"]")
    if value_of(kept.get("stream", NULL)):
        kept = dict(with_continuous_usage(kept))
    return {**kept, _EXTENSION: extension}


class StreamReader:
    """Moves the ids of a whole reply, or of the chunks of a stream, to where vLLM has them; returns JSON of another kind unchanged.

    A worker that is busy sends several tokens at once. If a parser of the frontend holds the text of the last ones back, their ids come
    first, and their log probabilities with the text, in a later chunk. So ids wait for their log probabilities, if a reply has some.

    `hides_usage`: whether the usage of a chunk with a choice is not for the client.
    """

    def __init__(self, *, hides_usage: bool) -> None:
        self._hides_usage = hides_usage
        self._waiting: list[int] = []
        self._has_logprobs = False

    def __call__(self, data: bytes) -> StreamChunk:
        """Read the JSON of a reply or a chunk."""
        try:
            fields = FIELDS.decode(data)
            choices = OBJECTS.decode(fields["choices"])
            given = fields.pop(_EXTENSION, NULL)
            extension = FIELDS.decode(given) if bytes(given) != b"null" else {}
            hides = self._hides_usage and bool(choices) and "usage" in fields
            counted = msgspec.json.decode(fields.pop("usage"), type=_Usage | None) if hides else None
            sampled, prompt = extension.pop(_SAMPLED, None), extension.pop(_PROMPT, None)
            if len(choices) == 1 and (sampled is not None or self._waiting):
                choices[0]["token_ids"] = Raw(msgspec.json.encode(self._with_logprobs(choices[0], sampled)))
        except (ValueError, KeyError, RecursionError):
            return StreamChunk(data)
        if prompt is not None:
            (choices[0] if len(choices) == 1 and "text" in choices[0] else fields)[_PROMPT] = prompt
        fields["choices"] = Raw(msgspec.json.encode(choices))
        if extension:
            fields[_EXTENSION] = Raw(msgspec.json.encode(extension))
        return StreamChunk(msgspec.json.encode(fields), counted.prompt_tokens if counted is not None else None)

    def _with_logprobs(self, choice: Mapping[str, Raw], sampled: Raw | None) -> list[int]:
        """Return the ids to which the log probabilities of a chunk belong; the others wait. The last chunk has all that are left."""
        found = self._waiting + (msgspec.json.decode(sampled, type=list[int] | None) or [] if sampled is not None else [])
        logprobs = msgspec.json.decode(choice.get("logprobs", NULL), type=_Logprobs | None)
        values = len(logprobs.content or ()) if logprobs is not None else 0
        self._has_logprobs = self._has_logprobs or values > 0
        if self._has_logprobs and value_of(choice.get("finish_reason", NULL)) is None:
            self._waiting = found[values:]
            return found[:values]
        self._waiting = []
        return found


class _Logprobs(msgspec.Struct):
    content: list[Raw] | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
