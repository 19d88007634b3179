"""Pure parsers of untrusted input, each as a function of bytes that raises only its documented errors.

hypothesis runs them in the test suite (`test_parsers.py`), and atheris, guided by coverage, in `make fuzz`.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tests.support.reading import read_chat
from tokencache.core import strict_json
from tokencache.core.messages import canonical_arguments, digest
from tokencache.dialects import gym, json_io, text_completions
from tokencache.dialects.base import DialectRequest, DirectReply, ModelCall, ServedModel, TokenCount
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.sampling import recorded
from tokencache.dialects.chat.vocabulary import read_message
from tokencache.dialects.completion_reader import read_completion
from tokencache.dialects.registry import dialect_of
from tokencache.dialects.sse import EventSplitter, data_of
from tokencache.engine.chunks import as_chunks
from tokencache.engine.figures import judge, wrong_prompt
from tokencache.engine.reply import Reply
from tokencache.errors import HarnessError
from tokencache.proxy.request_body import check_values
from tokencache.proxy.sessions import SessionFinder, SessionSources
from tokencache.server.http_guard import check_path
from tokencache.session_url import NamedPath, check_name
from tokencache.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

PATHS = {"messages": "/v1/messages", "responses": "/v1/responses", "gemini": "/v1beta/models/sim:generateContent"}


def driven(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine that never waits: everything that it awaits is available at once."""
    try:
        while True:
            work.send(None)
    except StopIteration as done:
        return done.value


async def _served() -> list[ServedModel]:
    return [ServedModel("sim")]


async def _documents(names: Any) -> list[None]:
    return [None for _ in names]


async def _forget(_name: str) -> bool:
    return False


def _dialect(name: str) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        path = PATHS[name]
        codec = dialect_of("POST", path, {})
        asked = DialectRequest(
            method="POST", path=path, query={}, headers={}, body=data, handle="0" * 32, served=_served, documents=_documents, forget=_forget
        )
        try:
            meant = driven(codec.parse(asked))
        except HarnessError as why:
            json.loads(codec.error(why.status, str(why), why.kind, why.param))
            return
        assert isinstance(meant, ModelCall | TokenCount | DirectReply)
        if isinstance(meant, ModelCall):
            read_chat(meant.body, IncrementalParser(), "s")

    return read


def chat(data: bytes) -> None:
    """A body parses the same whole and as an extension of another."""
    bodies = IncrementalParser()
    try:
        call = read_chat(data, bodies, "s")
    except HarnessError:
        return
    again = read_chat(data, bodies, "s")
    assert (again.chain, again.plain, list(again.raw_messages)) == (call.chain, call.plain, list(call.raw_messages))
    try:
        call.safe_messages()
        assert isinstance(recorded(call.fields), dict)
    except (HarnessError, ValueError):
        assert call.plain


def text_completion(data: bytes) -> None:
    with contextlib.suppress(HarnessError):
        text_completions.for_engine(text_completions.read(data))


def message(data: bytes) -> None:
    """The same entry has the same digest, however its JSON was written."""
    try:
        entry = strict_json.read(data)
        one = digest(read_message(entry))
        other = digest(read_message(strict_json.read(json_io.write(entry))))
    except (ValueError, RecursionError, HarnessError):
        return
    assert one == other


def arguments(data: bytes) -> None:
    """What is canonical already is not changed."""
    text = data.decode("utf-8", "surrogatepass") if _decodes(data) else data.decode("latin-1")
    once = canonical_arguments(text)
    if not once.startswith(b"\x00raw:") and b"\\u0000" not in once:
        assert canonical_arguments(once.decode()) == once


def _decodes(data: bytes) -> bool:
    try:
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def events(data: bytes) -> None:
    """However a stream is split, its events are the same, and none of its bytes is lost."""
    whole = EventSplitter()
    at_once = list(whole.feed(data))
    assert b"".join(at_once) + whole.rest == data
    pieces = EventSplitter()
    cut = [event for n in range(0, len(data), 3) for event in pieces.feed(data[n : n + 3])]
    assert b"".join(cut) + pieces.rest == data
    if b"\r" not in data:  # if CR and LF arrive in two pieces, the CR may end an event that the LF belongs to
        assert cut == at_once
    for event in at_once:
        data_of(event)


def reply(data: bytes) -> None:
    """Any output of an engine is parsed, or kept as unreadable, without an exception."""
    kept = Reply(1)
    kept.add(kept.without_experts(data))
    judge(kept, whole=True)
    wrong_prompt(kept)
    read_completion(data)
    gym.with_tokens(data, b"[1]", lambda: kept.choices)
    with contextlib.suppress(HarnessError):
        gym.take_out(data)
    with contextlib.suppress(ValueError):
        as_chunks(data, {})


def path(data: bytes) -> None:
    """A session's name is valid or none; the rest of a path is a path, and does not escape."""
    text = "/" + data.decode("latin-1")
    finder = SessionFinder(MemoryStore(), header="X-Tokencache-Session", sources=SessionSources())
    try:
        origin = driven(finder.find(NamedPath.read(text), {}))
        check_path(origin.path)
    except HarnessError:
        return
    assert origin.path.startswith("/")
    if origin.session is not None:
        check_name(origin.session)
    for written in (origin.path.partition("?")[0], unquote(origin.path.partition("?")[0], "latin-1").replace("\\", "/")):
        depth = 0
        for segment in written.split("/"):
            depth += -1 if segment == ".." else segment not in {"", "."}
            assert depth >= 0


def values(data: bytes) -> None:
    try:
        driven(check_values(data))
    except HarnessError as why:
        assert why.status == 413  # noqa: PT017 - which one it is


TARGETS: dict[str, Callable[[bytes], None]] = {
    "chat": chat,
    **{name: _dialect(name) for name in PATHS},
    "completions": text_completion,
    "message": message,
    "arguments": arguments,
    "events": events,
    "reply": reply,
    "path": path,
    "values": values,
}
SEEDS: dict[str, list[bytes]] = {
    "chat": [
        (
            b'{"model":"sim","messages":[{"role":"user","content":"x"},{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function",'
            b'"function":{"name":"f","arguments":"{\\"a\\":1}"}}]},{"role":"tool","tool_call_id":"a","content":[{"type":"text","text":"y"}]}],'
            b'"tools":[{"type":"function","function":{"name":"f","parameters":{}}}],"stream":true,"n":2,"logprobs":true,"temperature":1.0}'
        )
    ],
    "messages": [
        (
            b'{"model":"sim","max_tokens":9,"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":"x"},{"role":"assistant","content":'
            b'[{"type":"thinking","thinking":"t","signature":"s"},{"type":"tool_use","id":"a","name":"f","input":{}}]},{"role":"user","content":'
            b'[{"type":"tool_result","tool_use_id":"a","content":"y"}]}],"tools":[{"name":"f","input_schema":{}}],"stream":true}'
        )
    ],
    "responses": [
        (
            b'{"model":"sim","instructions":"i","input":[{"role":"user","content":[{"type":"input_text","text":"x"}]},{"type":"function_call","call_id":"a",'
            b'"name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"a","output":"y"},{"type":"reasoning","summary":[]}],'
            b'"tools":[{"type":"function","name":"f","parameters":{}}],"previous_response_id":"resp_x","stream":true}'
        )
    ],
    "gemini": [
        (
            b'{"contents":[{"role":"user","parts":[{"text":"x"}]},{"role":"model","parts":[{"functionCall":{"name":"f","args":{}},"thoughtSignature":"s"}]},'
            b'{"role":"user","parts":[{"functionResponse":{"name":"f","response":{}}}]}],"tools":[{"functionDeclarations":[{"name":"f"}]}],'
            b'"generationConfig":{"temperature":1,"stopSequences":["a"]},"systemInstruction":{"parts":[{"text":"s"}]}}'
        )
    ],
    "completions": [b'{"model":"sim","prompt":["x","y"],"n":2,"echo":false,"logprobs":1,"stream":true}'],
    "message": [
        (b'{"role":"assistant","content":"<think>t","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{\\"a\\": 1.0}"}}]}')
    ],
    "arguments": [b'{"a": 1, "b": [1.5, null, "\\ud800"], "c": 12345678901234567890}'],
    "events": [b'event: x\ndata: {"a":1}\n\n: c\r\n\r\ndata: [DONE]\n\n'],
    "reply": [
        (
            b'{"id":"a","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"x","tool_calls":'
            b'[{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}]},"logprobs":{"content":[{"token":"x","logprob":-1.0,"bytes":null,'
            b'"top_logprobs":[]}]},"finish_reason":"stop","token_ids":[1],"routed_experts":"abcd"}],"prompt_token_ids":[1,2],"usage":{"prompt_tokens":2}}'
        )
    ],
    "path": [b"s/a/h/codex/v1/chat/completions?key=tcs-b", b"ng-rollout/a/training-token-capture/v1/x", b"s/a/%2e%2e/%2E./x"],
    "values": [b'{"a":[1,2,{"b":"{\\"c\\":[,"}]}'],
}
