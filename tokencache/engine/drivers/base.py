"""Drivers: how what is upstream is asked for a reply on an exact prompt, and where it says what it sampled.

Every engine here speaks chat completions; they differ in how ids are handed in and where they come back:

============  ======================================================  ==========================================================
driver        an exact prompt is said as                              ids and log probabilities are read from
============  ======================================================  ==========================================================
`vllm`        `kv_transfer_params.prompt_token_ids`, the whole of it  the members of the answer and its choices; may stream
`nemo-rl`     `required_prefix_token_ids`, up to the last reply       the message of the answer
`nemo-gym`    three members on the last reply in the history          the message of the answer
`completions` the prompt of a text completion (`completions`)         its choices; the message is derender's
============  ======================================================  ==========================================================

The rest of the proxy knows one shape, vLLM's: a driver that finds the ids elsewhere puts them there (`read`) before
anybody looks. A driver that says only a prompt's beginning, up to the last reply, leaves the *tail* to the engine; where
we can render it, we know the whole prompt all the same, and the engine's echo is held against all of it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tokencache.core.ids import Pieces
from tokencache.dialects.chat.call import ChatCall
from tokencache.engine.questions import Answers
from tokencache.engine.segments import Written
from tokencache.engine.upstream import EngineResponse

if TYPE_CHECKING:
    from tokencache.engine.drivers.text_prompts import TokenPrompts

CHAT = "/v1/chat/completions"
_OK = 200


class Head(NamedTuple):
    """The reply with which the known history in a prompt ends.

    `place` is that of its message in the request; it stands in the prompt from token `start` up to token `end`. `logprobs`
    are its packed log probabilities, read for drivers that must say them, else empty.
    """

    place: int
    start: int
    end: int
    logprobs: bytes = b""


class Exact(NamedTuple):
    """An exact prompt: packed ids, the same as a JSON fragment in pieces (`core.ids`), and where its last reply stands."""

    ids: bytes
    fragment: Pieces
    head: Head


class Driver(Protocol):
    """How one kind of engine is spoken to.

    Attributes:
        name: as in the option `--engine`.
        how: in words, how ids are handed in.
        streams: whether it may be asked for a stream; if not, a whole reply is said as one.
        adds_tail: whether the engine itself puts the tail behind a history that is known up to its last reply.
        says_logprobs: whether it must say the log probabilities of that reply.
        pinned: sampling parameters that the engine insists on, whatever a harness asks; the trainer's own policy wins.
        detour: the way of a call with an exact prompt, where chat does not take one; `None` where it does.
    """

    name: str
    how: str
    streams: bool
    adds_tail: bool
    says_logprobs: bool
    pinned: Mapping[str, Any]
    detour: "TokenPrompts | None"

    def write(self, call: ChatCall, exact: Exact | None) -> bytes | Written:
        """Write the engine's request, around an exact prompt, or for the engine to render."""

    def read(self, body: bytes) -> bytes:
        """Put ids and log probabilities of a whole answer where vLLM has them; what cannot be read stays as it is."""

    def unsayable(self, call: ChatCall, head: Head) -> str:
        """Say why a prompt whose last reply is `head` cannot be handed to this engine; `""` if it can."""

    def question(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Say a small question of our own, a chat request, as this engine takes it."""

    def supplied(self, asked: bytes, reply: bytes, prompt: list[int]) -> dict[str, Any]:
        """Hand in ids that nobody would render, in a question: raw messages for it to stand on, and the ids.

        Either they are the whole prompt, or (`adds_tail`) its beginning, up to the end of `reply`.
        """


class Asks(Protocol):
    """Whatever small questions can be put to."""

    async def post(self, path: str, body: Any) -> EngineResponse:
        """Post JSON and read the whole answer.

        Raises:
            EngineError: the engine cannot be reached or broke off.
        """


class DriverChat:
    """An engine as small questions of our own are put to it: chat in its driver's words, all else as it is."""

    def __init__(self, upstream: Answers, driver: Driver) -> None:
        self._upstream = upstream
        self._driver = driver

    async def post(self, path: str, body: Any) -> EngineResponse:
        """See `Asks.post`."""
        if path != CHAT:
            return await self._upstream.post(path, body)
        named = {name: value for name, value in body.items() if name != "model" or value}
        if self._driver.detour is not None and "prompt_token_ids" in named:
            return await self._driver.detour.question(self._upstream, named, named.pop("prompt_token_ids"))
        answer = await self._upstream.post(path, self._driver.question(named))
        return answer._replace(body=self._driver.read(answer.body)) if answer.status == _OK else answer


def last_reply(call: ChatCall) -> int:
    """The place of the last assistant's message in a request; -1 if there is none."""
    return next(call.conversation.replies(), -1) if call.conversation is not None else -1
