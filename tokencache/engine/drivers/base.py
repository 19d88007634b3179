"""Defines what a driver does. A driver contains all code that depends on the kind of engine.

Every supported engine answers chat completions. Engines differ in how a request supplies an exact prompt, and in where the reply contains
its token ids:

============  ====================================================  ==========================================================
driver        the request supplies an exact prompt as               ids and log probabilities are read from
============  ====================================================  ==========================================================
`vllm`        `kv_transfer_params.prompt_token_ids`, all of it      the members of the reply and its choices; may stream
`nemo-rl`     `required_prefix_token_ids`, up to the last reply     the message of the reply
`nemo-gym`    three members on the last reply of the history        the message of the reply
`completions` the prompt of a text completion                       the choices; a second request, derender, makes the message
`dynamo`      `nvext.token_data`, all of it                         `nvext` of the reply and of each chunk; may stream
============  ====================================================  ==========================================================

The rest of the proxy knows only vLLM's format. If an engine has the ids elsewhere, its driver moves them (`Driver.read`). If a driver can
supply only the beginning of a prompt, up to the end of the last reply, the engine adds the *tail* (`adds_tail`). Where the proxy can render
that tail, it knows the whole prompt and compares all of it with the ids that the engine reports.

To add an engine, write one file with a subclass of `Driver`, and add one line to `registry`.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote

import msgspec
from multidict import CIMultiDict

from tokencache.core.ids import Fragment
from tokencache.core.media import PlacedMedia, Places
from tokencache.dialects.chat.request import ChatCall
from tokencache.engine.capacity import CapacityError, read_capacities
from tokencache.engine.connections import Segments
from tokencache.engine.derender import Derender
from tokencache.engine.image_names import NamedImage
from tokencache.engine.image_support import ImageSupport
from tokencache.engine.prefixes import PromptName
from tokencache.engine.template.renderer import EngineRenderer
from tokencache.engine.upstream import EngineClient, EngineResponse

CHAT = "/v1/chat/completions"


class LastReply(msgspec.Struct, frozen=True):
    """The reply at the end of the known history in a prompt.

    `place` is the index of its message in the request. `start` and `end` are its half-open range of tokens in the prompt. `logprobs` are
    its packed log probabilities for drivers that send them (`Driver.sends_logprobs`), otherwise empty.
    """

    place: int
    start: int
    end: int
    logprobs: bytes = b""


class ExactPrompt(msgspec.Struct, frozen=True):
    """An exact prompt.

    Attributes:
        prefix: its packed ids up to `tail`.
        fragment: all its ids as a JSON fragment (`core.ids`).
        last_reply: its last reply.
        media: the images and other media in its beginning, as far as they are recorded. Those of new messages may follow.
        sampled: positions at which the model itself sampled an id of a placeholder.
        tail: the packed ids after `prefix`.
    """

    prefix: bytes
    fragment: Fragment
    last_reply: LastReply
    media: tuple[PlacedMedia, ...] = ()
    sampled: tuple[int, ...] = ()
    tail: bytes = b""

    @property
    def ids(self) -> bytes:
        """The packed ids, joined."""
        return self.prefix + self.tail


class Target(msgspec.Struct, frozen=True):
    """Where to send a call.

    Attributes:
        upstream: the engine.
        path: the path that the harness called.
        headers: the headers.
        max_model_len: the limit of prompt and reply together, in tokens; 0 if unknown.
        images: how the engine takes exact prompts with images.
        names: the names of the call's images; empty if they have none.
        prompt: how the request names its prompt; `None` if it has the ids themselves, as a stock engine accepts them.
        generates: whether the engine may have the routes of `engine.generate`.
    """

    upstream: EngineClient
    path: str
    headers: CIMultiDict[str]
    max_model_len: int = 0
    images: ImageSupport = ImageSupport()
    names: tuple[NamedImage, ...] = ()
    prompt: PromptName | None = None
    generates: bool = True


class ParsedCompletion(NamedTuple):
    """A chat completion that a second request made from an engine's answer.

    `error` is the reason why it has no messages, `""` if it has them; it has the tokens in any case. `temporary` is whether a later
    attempt may succeed. `places` are those of the images in the prompt; `None` if the answer does not report them.
    """

    body: bytes
    error: str = ""
    temporary: bool = False
    places: Places | None = None


class StreamChunk(NamedTuple):
    """A chunk of a stream in vLLM's format, for the reply and the client.

    `prompt_tokens` is the number of the prompt's tokens that the engine counted in it, if the client does not get that; otherwise `None`.
    """

    data: bytes
    prompt_tokens: int | None = None


class EngineRequest(msgspec.Struct, frozen=True):
    """A call in the format of an engine.

    Attributes:
        path: the path at the engine.
        body: the request body (JSON).
        parse: makes a chat completion from the body of an answer (status 200) with a second request; `None` if the body is one already.
        not_exact: why the request does not contain the exact prompt, so that the engine renders; `""` if it does, or if there was none.
        late_grammar: whether a grammar binds the reply only after its thought, and the reply to a direct call from its first token.
        named: whether it names its prompt (`Target.prompt`). A request to another route than chat has all ids.
        read_chunk: makes a chunk in vLLM's format from the JSON of one in the engine's; `None` if they are the same.
        sent: the ids that it contains although there was no exact prompt, because the driver had them rendered; otherwise `None`.
        counted: whether the number of the prompt's tokens proves that the engine used the ids that it was sent. So it is if an engine that
            cannot use ids refuses them, and it reports the ids themselves only at the end of a stream.
    """

    path: str
    body: bytes | Segments
    parse: Callable[[bytes], Awaitable[ParsedCompletion]] | None = None
    read_chunk: Callable[[bytes], StreamChunk] | None = None
    sent: Fragment | None = None
    counted: bool = False
    not_exact: str = ""
    late_grammar: bool = False
    named: bool = False


class Driver(ABC):
    """How to use one kind of engine. The defaults fit an engine with vLLM's routes and replies.

    Attributes:
        name: the name in the option `--engine`, in metrics and in the probe's findings.
        how: how it supplies an exact prompt, in words.
        streams: whether it may request a stream. If not, a streaming harness receives the whole reply as a stream.
        adds_tail: whether the engine adds the tail after a history that is known up to its last reply.
        sends_logprobs: whether a request must contain the log probabilities of that reply.
        skips_experts: whether a request may name the first token whose routed experts it wants (`routed_experts_prompt_start`). An engine
            that ignores the member returns all, which the proxy recognizes.
        images: whether it can supply an exact prompt with images, where the engine accepts one (`engine.images`).
        prefixes: whether it can name a prompt by a hash, where the engine accepts that (`engine.prefixes`).
        generates: whether it uses the routes of `engine.generate`, where the engine has them.
        ranks: whether it pins requests to a data-parallel rank, where the engine has several (`engine.ranks`).
        pinned: sampling parameters that the engine requires, whatever a harness requests. The trainer's own policy overrides them.
        refusal_hint: what to check if the engine refuses the driver's requests with a 500 without a message; `""` if there is no advice.
        ignored_hint: what to do if a server in front of the engine replaces supplied ids; `""` if there is no advice.
        overflow_words: texts by which a refusal (400) of a prompt that leaves no room for a reply is recognized. NeMo Gym's server (0.7.0)
            searches vLLM's refusals for the first two defaults; the last is from vLLM's check of supplied ids (0.32,
            `v1/engine/input_processor.py`).
        renderer: the engine's tokenizer: renders conversations with its chat template, encodes and decodes texts.
        weights_route: the route that returns the engine's own label of its weights (vLLM with `VLLM_SERVER_DEV_MODE=1`).
        limit_member: the member of a model in `/v1/models` that has the limit of prompt and reply together, in tokens.
        names_sessions: whether `name_session` changes the headers of requests.
        capacity_route: the route that returns the engine's metrics, with the size of its KV cache; `""` if it has none.
        derender: makes messages of token ids, to continue replies that were broken off; `None` if replies cannot be continued.
    """

    name: ClassVar[str]
    how: ClassVar[str]
    streams: bool = True
    adds_tail: ClassVar[bool] = False
    sends_logprobs: ClassVar[bool] = False
    skips_experts: ClassVar[bool] = False
    images: ClassVar[bool] = False
    prefixes: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    ranks: ClassVar[bool] = False
    pinned: Mapping[str, Any] = {}
    refusal_hint: ClassVar[str] = ""
    ignored_hint: ClassVar[str] = ""
    overflow_words: ClassVar[tuple[bytes, ...]] = (b"context length", b"max_tokens", b"maximum model length")
    renderer: ClassVar[type[EngineRenderer]] = EngineRenderer
    weights_route: ClassVar[str] = "/weight_info"
    limit_member: ClassVar[str] = "max_model_len"
    names_sessions: ClassVar[bool] = False
    capacity_route: ClassVar[str] = "/metrics"
    derender: Derender | None = None

    @abstractmethod
    def write(self, call: ChatCall, prompt: ExactPrompt | None) -> bytes | Segments:
        """Write the chat request (JSON) with an exact prompt; with `None` the engine renders."""

    @abstractmethod
    def probe_members(self, question: bytes, reply: bytes, prompt: list[int]) -> dict[str, Any]:
        """Return the members of a chat request that supplies other ids than any rendering of its messages.

        Args:
            question: a user message, raw.
            reply: an assistant message, raw.
            prompt: the ids: the whole prompt, or (`adds_tail`) its beginning up to the end of `reply`.
        """

    async def request(self, call: ChatCall, prompt: ExactPrompt | None, target: Target) -> EngineRequest:
        """Make the request for a call with an exact prompt; with `None` the engine renders."""
        return EngineRequest(target.path, self.write(call, prompt))

    async def places(self, call: ChatCall, prompt: bytes, target: Target) -> Places | None:
        """Ask where the images of a call are in its prompt (packed ids), which the engine rendered; `None` if it cannot say.

        Raises:
            EngineError: the engine cannot be reached, or refuses.
        """
        del call, prompt, target
        return None

    def text_request(self, path: str, body: bytes) -> EngineRequest:
        """Make the request for a text completion whose request body (JSON) is vLLM's; it asks for ids."""
        return EngineRequest(path, body)

    def read(self, body: bytes) -> bytes:
        """Move ids and log probabilities in the body of a whole reply to where vLLM has them; return an unreadable body unchanged."""
        return body

    def is_overflow(self, status: int, refusal: bytes) -> bool:
        """Whether the engine refuses a prompt because it leaves no room for a reply."""
        return status == HTTPStatus.BAD_REQUEST and any(words in refusal for words in self.overflow_words)

    def name_session(self, headers: CIMultiDict[str], session: str) -> None:
        """Write the session's name into the headers of a request of it; what they say of it comes from the harness."""
        del headers, session

    async def end_session(self, engine: EngineClient, session: str, model: str) -> int:
        """Tell what is behind an engine's URL that a session has ended; return the HTTP status of its answer.

        The default is the route of vllm-router (pull request 235) and prime-rl. `model` is any model that the engine serves.

        Raises:
            EngineError: it cannot be reached, or closed the connection.
        """
        del model
        return (await engine.post(f"/finish_session?session_id={quote(session, safe='')}", {})).status

    async def refuses_for_now(self, engine: EngineClient, status: int, path: str, model: str) -> bool:
        """Whether the engine may accept later what it has refused with this status, although that is not in `errors.NOT_NOW`.

        `path` is where the request was sent; `model` is the one that it names, `""` if none.

        Raises:
            EngineError: the engine cannot be reached, or cannot answer now.
        """
        del engine, status, path, model
        return False

    async def cautions(self, engine: EngineClient, model: str) -> tuple[str, ...]:
        """Return what is wrong with the engine's options, or cannot be checked, each in words that say what to do.

        Raises:
            EngineError: the engine cannot be reached, or cannot answer now.
        """
        del engine, model
        return ()

    def cannot_supply(self, call: ChatCall, last_reply: LastReply) -> str:
        """Return the reason why a prompt with this last reply cannot be supplied to the engine; `""` if it can."""
        del call, last_reply
        return ""

    def own_request(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Adapt a small chat request that the proxy itself makes to the engine."""
        return body

    async def ask(self, upstream: EngineClient, body: Mapping[str, Any]) -> EngineResponse:
        """Send a small chat request that the proxy itself makes; it may contain `probe_members`.

        Raises:
            EngineError: the engine cannot be reached, or closed the connection.
        """
        members = {name: value for name, value in body.items() if name != "model" or value}
        answer = await upstream.post(CHAT, self.own_request(members))
        return msgspec.structs.replace(answer, body=self.read(answer.body)) if answer.status == HTTPStatus.OK else answer

    async def version(self, engine: EngineClient) -> str:
        """Return the version that the engine reports; `"unknown"` if it reports none.

        Raises:
            EngineError: the engine cannot be reached, or cannot answer now.
        """
        found = (await engine.get("/version")).json()
        return str(found.get("version", "unknown")) if isinstance(found, dict) else "unknown"

    def weight_label(self, answer: EngineResponse) -> str | None:
        """Read the engine's own label of its weights in its answer at `weights_route`; `None` if the answer has none."""
        found = answer.json() if answer.status == HTTPStatus.OK else None
        label = found.get("weight_version", "") if isinstance(found, dict) else None
        return label if isinstance(label, str) else None

    def capacities(self, answer: EngineResponse) -> dict[str, int]:
        """Read the size of the KV cache of each data-parallel rank in the answer at `capacity_route`: rank → tokens.

        Raises:
            CapacityError: the answer does not have it, or has something that cannot be.
        """
        if answer.status != HTTPStatus.OK:
            raise CapacityError(f"{self.capacity_route} answered {answer.status}")
        return read_capacities(answer.body)

    async def cannot_parse(self, upstream: EngineClient, renderer: EngineRenderer, model: str) -> str:
        """Test the second request that parses replies, if the driver uses one; return what is wrong with its result, otherwise `""`.

        Raises:
            EngineError: the engine cannot be reached, or cannot answer now.
        """
        del upstream, renderer, model
        return ""


def last_reply_place(call: ChatCall) -> int:
    """Return the index of the last assistant message in a request; -1 if there is none."""
    return call.conversation.replies[-1] if call.conversation is not None and call.conversation.replies else -1
