"""Responses: questions about responses that are kept, answered from our own documents."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from tokencache.dialects.dialect import DialectRequest, DirectReply
from tokencache.dialects.responses.items import Item
from tokencache.dialects.responses.kept import Library, document
from tokencache.errors import HarnessError

_PATH = re.compile(r"/(resp_([0-9a-f]{32})|[^/]+)(/input_items|/cancel)?")
_NOT_FOUND, _NOT_ALLOWED = 404, 405
_PAGE, _MOST = 20, 100


async def answer_stored(asked: DialectRequest, path: str) -> DirectReply:
    """Answer a request about a response; `path` is what follows `/v1/responses`.

    Raises:
        HarnessError: there is no such response, or no such question.
        StoreError: a document could not be read.
    """
    found = _PATH.fullmatch(path)
    if found is None:
        raise HarnessError(f"Invalid URL ({asked.method} {asked.path})", status=_NOT_FOUND if path else _NOT_ALLOWED)
    name, handle, question = found.groups()
    match asked.method, question:
        case "GET", None:
            if asked.query.get("stream", "").lower() in {"true", "1"}:
                raise HarnessError("'stream' is not supported: no events are kept of a response", param="stream")
            response = await Library(asked.documents).response(handle) if handle else None
            if response is None:
                raise _unknown(name)
            return DirectReply(body=msgspec.json.encode(response))
        case "GET", "/input_items":
            items = await Library(asked.documents).history(handle, output=False) if handle else None
            if items is None:
                raise _unknown(name)
            return DirectReply(body=_page([_listed(item, f"{handle}:{i}") for i, item in enumerate(items)], asked.query))
        case "DELETE", None:
            if not handle or not await asked.forget(document("rec", handle)):
                raise _unknown(name)
            return DirectReply(body=msgspec.json.encode({"id": name, "object": "response", "deleted": True}))
        case "POST", "/cancel":
            raise HarnessError("Cannot cancel a synchronous response: 'background' is not supported")
        case _:
            raise HarnessError(f"Invalid method for URL ({asked.method} {asked.path})", status=_NOT_ALLOWED)


def _unknown(name: str) -> HarnessError:
    return HarnessError(f"Response with id '{name}' not found.", status=_NOT_FOUND)


def _listed(item: Item, place: str) -> dict[str, Any]:
    """An item as a list of input items shows it: with an id, and a message in its long form."""
    shown: dict[str, Any] = dict(item[1])
    kind = shown.setdefault("type", "message")
    shown.setdefault("id", f"{'msg' if kind == 'message' else 'item'}_{xxhash.xxh3_128_hexdigest(place.encode())}")
    if kind != "reasoning":
        shown.setdefault("status", "completed")
    if kind == "message" and isinstance(shown.get("content"), str):
        said = shown["role"] == "assistant"
        part = {"type": "output_text" if said else "input_text", "text": shown["content"]}
        shown["content"] = [{**part, "annotations": [], "logprobs": []} if said else part]
    return shown


def _page(items: list[dict[str, Any]], query: Mapping[str, str]) -> bytes:
    order, limit = query.get("order", "desc"), query.get("limit", str(_PAGE))
    if order not in {"asc", "desc"}:
        raise HarnessError("'order' must be 'asc' or 'desc'", param="order")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST:
        raise HarnessError(f"'limit' must be between 1 and {_MOST}", param="limit")
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise HarnessError(f"Item with id '{after}' not found.", param="after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )
