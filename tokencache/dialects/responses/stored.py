"""Stores responses, so that a client can fetch and continue them by id.

With `store` (OpenAI's default) a response leaves four documents in its session, named by its handle:

    resp:rec:<handle>   the response without its output and without what many responses share
    resp:out:<handle>   its output items
    resp:in:<handle>    its context: the items that were new in its input, and where the items before them are stored
    resp:as:<hash>      what responses share: tools, instructions, settings

A context lists the documents before it, oldest first. So a chain of responses is read in three round trips, and one more for every few
dozen responses. Only new items are stored, even if a client sends its whole history every time and leaves `store` at its default: the
items of the previous input are cut off. The previous input is found by the handle in the newest reply among the items, and its items must
be the same bytes (their hash is stored). A long list is not copied: the next context begins a new list and names the context before it.

`DELETE` removes only the record, so responses that continue this one stay complete.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import xxhash

from tokencache.dialects.base import DialectRequest, DirectReply
from tokencache.dialects.json_io import FIELDS, VALUES
from tokencache.dialects.responses.vocabulary import Item, handle_of
from tokencache.errors import HarnessError

Raw = msgspec.Raw
Documents = Callable[[Sequence[str]], Awaitable[list[bytes | None]]]
_LISTED = 64
"""The most documents that one context lists."""


class StoredInput(msgspec.Struct, omit_defaults=True):
    """Where the input of a response is stored.

    Attributes:
        items: items that were new with this response.
        parts: documents with the items before them (`in:<handle>`, `out:<handle>`), oldest first.
        earlier: handle of the context whose whole input precedes `parts`; `""` if there is none.
        count, digest: the number of items of an input that a client sent as a whole, and the hash of their bytes.
    """

    items: list[Raw] = []
    parts: list[str] = []
    earlier: str = ""
    count: int = 0
    digest: str = ""


class Record(msgspec.Struct):
    """A response without its output; `shared` names the document with the rest of its members."""

    response: dict[str, Any]
    shared: str


_CONTEXT = msgspec.json.Decoder(StoredInput)
_RECORD = msgspec.json.Decoder(Record)


def document(kind: str, name: str) -> str:
    """Make the name of a document."""
    return f"resp:{kind}:{name}"


class Library:
    """Reads the documents of a session."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    async def response(self, handle: str) -> dict[str, Any] | None:
        """Read a whole response; `None` if it is not stored.

        Raises:
            StoreError: a document could not be read.
        """
        known, output = await self._documents([document("rec", handle), document("out", handle)])
        if known is None or output is None:
            return None
        record = _RECORD.decode(known)
        shared = (await self._documents([record.shared]))[0]
        return {**record.response, **(FIELDS.decode(shared) if shared is not None else {}), "output": Raw(output)}

    async def history(self, handle: str, *, output: bool) -> list[Item] | None:
        """Read all items of a response's input, and with `output` those of its output; `None` if it is not stored, or was deleted.

        Raises:
            StoreError: a document could not be read.
        """
        known, found = await self._documents([document("rec", handle), document("in", handle)])
        if known is None or found is None:
            return None
        context = _CONTEXT.decode(found)
        names = [*context.parts, f"in:{handle}", *([f"out:{handle}"] if output else [])]
        while context.earlier:  # each context was written after the one it names
            before = await self._context(context.earlier)
            if before is None:
                return None
            names = [*before.parts, f"in:{context.earlier}", *names]
            context = before
        items: list[Item] = []
        for name, found in zip(names, await self._documents([f"resp:{name}" for name in names]), strict=True):
            if found is None:
                return None
            raws = _CONTEXT.decode(found).items if name.startswith("in:") else VALUES.decode(found)
            items += [(bytes(raw), msgspec.json.decode(raw)) for raw in raws]
        return items

    async def referred(self, items: list[Item]) -> list[Item]:
        """Replace references to items with the items.

        Raises:
            HarnessError: no such item is stored.
            StoreError: a document could not be read.
        """
        wanted = {
            i: item
            for i, (_, item) in enumerate(items)
            if isinstance(item, dict)
            and ((kind := item.get("type")) == "item_reference" or (kind is None and "id" in item and "role" not in item))
        }  # OpenAI's API does not require the type of a reference (openai 3.52, `ItemReference`)
        if not wanted:
            return items
        handles = sorted({handle_of(item) for item in wanted.values()} - {""})
        outputs = await self._documents([document("out", handle) for handle in handles])
        known: dict[Any, Item] = {}
        for output in outputs:
            for raw in VALUES.decode(output) if output is not None else ():
                item = msgspec.json.decode(raw)
                known[item["id"]] = (bytes(raw), item)
        for i, reference in wanted.items():
            name = reference.get("id")
            if not isinstance(name, str) or name not in known:
                raise HarnessError(f"Item with id '{name}' not found.", param=f"input[{i}].id")
        return [known[wanted[i]["id"]] if i in wanted else item for i, item in enumerate(items)]

    async def continued(self, items: list[Item], sent: list[bytes]) -> StoredInput:
        """Make the context of an input that was sent as a whole. If it continues a stored context, the new one refers to that.

        `items` are the input's items, `sent` their bytes as they arrived (references not replaced).

        Raises:
            StoreError: a context could not be read.
        """
        own = StoredInput([Raw(raw) for raw, _ in items], count=len(sent), digest=_digest(sent))
        handle = next((found for _, item in reversed(items) if isinstance(item, dict) and (found := handle_of(item))), "")
        base = await self._context(handle) if handle else None
        if base is None or not 0 < base.count <= len(sent) or base.digest != _digest(sent[: base.count]):
            return own
        own.items = own.items[base.count :]
        return _after(own, handle, base, output=False)

    async def answered(self, items: list[Item], handle: str) -> StoredInput:
        """Make the context of items that continue a stored response. It refers to that response's input and output.

        Raises:
            StoreError: its context could not be read.
        """
        own, base = StoredInput([Raw(raw) for raw, _ in items]), await self._context(handle)
        return own if base is None else _after(own, handle, base, output=True)

    async def _context(self, handle: str) -> StoredInput | None:
        found = (await self._documents([document("in", handle)]))[0]
        return _CONTEXT.decode(found) if found is not None else None


def _after(own: StoredInput, handle: str, base: StoredInput, *, output: bool) -> StoredInput:
    """Let a context continue that of another response. `output`: it also continues its output, which the items do not contain."""
    replied = [f"out:{handle}"] if output else []
    if len(base.parts) < _LISTED:
        own.parts, own.earlier = [*base.parts, f"in:{handle}", *replied], base.earlier
    else:
        own.parts, own.earlier = replied, handle
    return own


def kept(handle: str, context: StoredInput, shared: dict[str, Raw], response: dict[str, Any]) -> dict[str, bytes]:
    """Make the documents of a response, by name."""
    own = {name: value for name, value in response.items() if name not in shared and name != "output"}
    same = msgspec.json.encode(shared)
    name = document("as", xxhash.xxh3_128_hexdigest(same))
    return {
        document("rec", handle): msgspec.json.encode(Record(own, name)),
        document("out", handle): msgspec.json.encode(response["output"]),
        document("in", handle): msgspec.json.encode(context),
        name: same,
    }


def _digest(items: list[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b",".join(items))


_PATH = re.compile(r"/(resp_([0-9a-f]{32})|[^/]+)(/input_items|/cancel)?")
_PAGE, _MOST = 20, 100
_NOT_COMPACTED = "conversations are not compacted here: let the client summarize them (Codex does unless its provider is named 'OpenAI')"


async def answer_stored(request: DialectRequest, path: str) -> DirectReply:
    """Handle a request for a stored response; `path` is the part after `/v1/responses`.

    Raises:
        HarnessError: there is no such response, or no such route.
        StoreError: a document could not be read.
    """
    found = _PATH.fullmatch(path)
    if found is None:
        raise HarnessError(
            f"Invalid URL ({request.method} {request.path})", status=HTTPStatus.NOT_FOUND if path else HTTPStatus.METHOD_NOT_ALLOWED
        )
    name, handle, question = found.groups()
    match request.method, question:
        case "GET", None:
            if request.query.get("stream", "").lower() in {"true", "1"}:
                raise HarnessError("'stream' is not supported: the events of a response are not stored", param="stream")
            response = await Library(request.documents).response(handle) if handle else None
            if response is None:
                raise _unknown(name)
            return DirectReply(body=msgspec.json.encode(response))
        case "GET", "/input_items":
            items = await Library(request.documents).history(handle, output=False) if handle else None
            if items is None:
                raise _unknown(name)
            return DirectReply(body=_page([_listed(item, f"{handle}:{i}") for i, item in enumerate(items)], request.query))
        case "DELETE", None:
            if not handle or not await request.forget(document("rec", handle)):
                raise _unknown(name)
            return DirectReply(body=msgspec.json.encode({"id": name, "object": "response", "deleted": True}))
        case "POST", "/cancel":
            raise HarnessError("Cannot cancel a synchronous response: 'background' is not supported")
        case _:
            message = f"Invalid method for URL ({request.method} {request.path})"
            raise HarnessError(_NOT_COMPACTED if name == "compact" else message, status=HTTPStatus.METHOD_NOT_ALLOWED)


def _unknown(name: str) -> HarnessError:
    return HarnessError(f"Response with id '{name}' not found.", status=HTTPStatus.NOT_FOUND)


def _listed(item: Item, seed: str) -> dict[str, Any]:
    """Return an item as `/input_items` shows it: with an id, and a message in its long form."""
    shown: dict[str, Any] = dict(item[1])
    kind = shown.setdefault("type", "message")
    shown.setdefault("id", f"{'msg' if kind == 'message' else 'item'}_{xxhash.xxh3_128_hexdigest(seed.encode())}")
    if kind != "reasoning":
        shown.setdefault("status", "completed")
    if kind == "message" and isinstance(shown.get("content"), str):
        output = shown["role"] == "assistant"
        part = {"type": "output_text" if output else "input_text", "text": shown["content"]}
        shown["content"] = [{**part, "annotations": [], "logprobs": []} if output else part]
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
        positions = [i for i, item in enumerate(items) if item["id"] == after]
        if not positions:
            raise HarnessError(f"Item with id '{after}' not found.", param="after")
        items = items[positions[0] + 1 :]
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
