"""Speaks two routes of vLLM that take ids and images: `/inference/v1/generate`, and `/v1/chat/completions/render`, which prepares requests.

Both need `--enable-scale-out` (vLLM 0.30 and later; the formats are those of 0.32, `entrypoints/scale_out/token_in_token_out/protocol.py`).
`generate` takes compact ids (`core.expansion`) and images, expands them, and reports the expanded ids and their places. It does not know
chat requests. `render` returns the request to `generate` for a chat request: its expanded ids, the places of its images, and the sampling
parameters that chat would use. `generate` applies no defaults of the model by itself.

What `generate` (0.32) does with wrong requests, all with status 200: it expands expanded ids again, leaves placeholders without images as
they are, and ignores parts of unknown types. So its answer is compared with what was expected, each time. Its member `features` takes
expanded ids, but loses masks of embeddings, and an unseen image can end the engine's process. It is not used.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from tokencache.core.expansion import Place
from tokencache.core.media import Places
from tokencache.dialects.json_io import FIELDS
from tokencache.engine.derender import RENDER
from tokencache.engine.upstream import EngineClient, EngineResponse
from tokencache.errors import NO_ROUTE, EngineError

Raw = msgspec.Raw

GENERATE = "/inference/v1/generate"
_NONE = Raw(b'"none"')
_NOT_SENT = ("request_id", "features", "stream", "stream_options", "token_offsets")
"""Members of a rendered request that are not sent to `generate`: the images are sent as parts, and the reply is not streamed."""
_NOT_SAMPLING = ("output_kind", "skip_clone")


class _Range(msgspec.Struct):
    offset: int
    length: int


_Ranges = dict[str, list[_Range]]


class _Features(msgspec.Struct):
    mm_placeholders: _Ranges = {}


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    sampling_params: dict[str, Any]
    features: _Features | None = None
    reasoning_ended: bool | None = None


class _Generated(msgspec.Struct):
    prompt_token_ids: list[int] = []
    mm_placeholders: _Ranges | None = None


class RenderedRequest(NamedTuple):
    """What `render` returns for a chat request: expanded ids, places of the images, sampling parameters, and all members (raw)."""

    ids: list[int]
    places: Places
    sampling: dict[str, Any]
    members: Mapping[str, Raw]

    @property
    def images(self) -> Sequence[Place]:
        """The places of the images."""
        return self.places.get("image", ())

    def limit(self, prompt: int, max_model_len: int) -> int:
        """Return the limit of the reply after a prompt of so many tokens; `max_model_len` is 0 if unknown."""
        own = int(self.sampling.get("max_tokens") or 0)
        room = max_model_len - prompt if max_model_len else own
        return min(own or room, room)


async def has_routes(engine: EngineClient, model: str, question: bytes) -> bool:
    """Whether an engine may have these routes; `question` is a user message, raw. Only a missing route (404, 405) shows that it has not.

    Raises:
        EngineError: the engine cannot be reached.
    """
    answer = await engine.query(RENDER, msgspec.json.encode({"model": model, "messages": [Raw(question)], "mm_payload": _NONE}))
    return answer.status not in NO_ROUTE


async def render_request(engine: EngineClient, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> RenderedRequest:
    """Render a chat request; `fields` are its members.

    Raises:
        EngineError: the engine cannot be reached, or refuses, or its answer cannot be read.
    """
    body = msgspec.json.encode({**fields, "mm_payload": _NONE})
    answer = await engine.query(RENDER, body, headers)
    if answer.status != HTTPStatus.OK:
        raise refusal(RENDER, answer)
    try:
        read = msgspec.json.decode(answer.body, type=_Rendered)
        members = FIELDS.decode(answer.body)
    except (ValueError, RecursionError) as why:
        raise EngineError(f"{RENDER} returned no request: {why}") from why
    places = _places(read.features.mm_placeholders) if read.features is not None else {}
    return RenderedRequest(read.token_ids, places, read.sampling_params, members)


def generate_body(rendered: RenderedRequest, prompt: Sequence[int], images: Sequence[Mapping[str, Any]], max_tokens: int) -> bytes:
    """Write a request to `generate`: the rendered request with other ids and images.

    Args:
        rendered: a rendered request with the same sampling parameters.
        prompt: compact ids.
        images: a part for each image, in order: `type` and `url`, and `uuid` if it has a name.
        max_tokens: the limit of the reply.
    """
    body: dict[str, Any] = {name: raw for name, raw in rendered.members.items() if name not in _NOT_SENT}
    sampling = {name: _public(value) for name, value in rendered.sampling.items() if value is not None and name not in _NOT_SAMPLING}
    body["sampling_params"] = sampling | {"max_tokens": max_tokens}
    if bytes(body.get("reasoning_ended", b"")) == b"false":  # that is for another prompt: let the engine look at this one
        del body["reasoning_ended"]
    body |= {"token_ids": prompt, "return_token_ids": True, "output_mode": "text", **({"content_parts": images} if images else {})}
    return msgspec.json.encode(body)


def read_generated(body: bytes) -> tuple[list[int], Places | None]:
    """Read the expanded ids of an answer of `generate`, and the places of its images.

    Raises:
        ValueError, RecursionError: it is not such an answer.
    """
    read = msgspec.json.decode(body, type=_Generated)
    return read.prompt_token_ids, _places(read.mm_placeholders) if read.mm_placeholders is not None else None


def refusal(path: str, answer: EngineResponse) -> EngineError:
    """Make an error of a refusal."""
    return EngineError(f"{path} answered {answer.status}: {answer.body[:300].decode(errors='replace')}", status=answer.status)


def _places(ranges: _Ranges) -> Places:
    return {modality: [(one.offset, one.length) for one in listed] for modality, listed in ranges.items()}


def _public(value: Any) -> Any:
    """Leave out vLLM's private members, which a request may not have, and what is not set."""
    if not isinstance(value, dict):
        return value
    return {name: inner for name, inner in value.items() if inner is not None and not name.startswith("_")}
