"""Fetches images that a request names by URL, and writes their bytes into the request (`--fetch-media`).

An engine would fetch them itself, in every turn, so that nobody knows which bytes it used. Here each URL of a session is fetched once. The
engine, the record and the comparison of histories then have the same bytes, as if the harness had sent them.

A harness may name any address, and the proxy is inside the network of the trainer. So every address to which a connection is made must be
public, also after a redirect: the check is at the connection, not at the name, which may resolve to another address the next time.

The engine is inside that network, too, so no address may reach it. What a request may have is decided on its decoded messages: texts, the
bytes of media, and images by URL (`http`, `https`), which are fetched. Anything else that looks like an address is refused. Other routes,
which are relayed, have media in other members (vLLM 0.32: `queries`, `documents`, `images`, `inputs`, `input`): there, an address is only
accepted in what is known to be text.
"""

import asyncio
import base64
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from tokencache.core import strict_json
from tokencache.dialects import json_io
from tokencache.dialects.chat.vocabulary import may_be_media
from tokencache.dialects.json_io import entries_of, fields_of
from tokencache.errors import HarnessError, TokencacheError
from tokencache.recent import RecentBySize
from tokencache.request_memory import Holding

MOST_BYTES = 20 * 2**20
"""Largest content that is fetched."""
SECONDS = 20.0
"""Longest time of one fetch, with all redirects."""
MOST_REDIRECTS = 3
MOST_IMAGES = 64
"""Number of URLs that one request may have."""
MOST_CONNECTIONS = 32
"""Fetches of this process at a time: their sockets are among those that the listener reserves."""
MEMORY = 256 * 2**20
"""Bytes of fetched contents that are remembered, as base64."""
_SCHEMES = ("http://", "https://")
_CHUNK = 64 * 1024
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""The IPv6 addresses that IANA allocates to networks; no others are public."""
_TRANSLATED = tuple(map(ipaddress.ip_network, ("2002::/16", "2001::/32")))
"""Addresses among them that stand for an IPv4 address: 6to4 and Teredo."""
_ADDRESS = re.compile(r"[\W_]*+[a-z][\w+.-]*+[^\w:]*+:[^\w/\\]*+[/\\]", re.IGNORECASE)
_WITHOUT_MEDIA = frozenset(
    {"messages", "tools", "metadata", "chat_template", "chat_template_kwargs", "response_format", "structured_outputs"}
)
"""Members of a relayed request that are not searched for addresses; those of `messages` are looked for one by one."""
_TEXTS = frozenset(
    ("text", "content", "input", "prompt", "texts", "query", "queries", "documents", "data_1", "data_2", "text_1", "text_2", "instructions")
)
"""Members of a relayed request whose value is a text, or a list of texts, if it is not an object (vLLM 0.32)."""
Raw = msgspec.Raw


def is_public(address: str) -> bool:
    """Whether an IP address is on the public Internet."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if found not in _GLOBAL_UNICAST or any(found in network for network in _TRANSLATED):
            return False
    return found.is_global and not found.is_multicast


class FetchedMedia:
    """Fetches images by URL, and remembers them by session. `allows` decides to which IP addresses connections are made."""

    def __init__(self, allows: Callable[[str], bool] = is_public) -> None:
        self._allows = allows
        self._known: RecentBySize[tuple[str, str], str] = RecentBySize(MEMORY, len)
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

    async def written_in(self, session: str, body: bytes, holding: Holding, *, most: int) -> bytes:
        """Replace the URLs of images in a chat completions request by data URIs.

        Args:
            session: the session's name.
            body: the request.
            holding: takes the bytes that are fetched and written.
            most: largest size of the request with its images, in bytes.

        Raises:
            HarnessError: the messages cannot be read, an image cannot be fetched, another part has an address, or the request is too large.
            MemoryFullError: requests hold as much memory as they may.
        """
        fields = fields_of(body)
        try:
            messages = entries_of(fields.get("messages", Raw(b"[]")))
            decoded = {index: strict_json.read(raw) for index, raw in enumerate(messages) if b"[" in raw}  # a content of parts is a list
        except (ValueError, RecursionError):
            raise HarnessError("'messages' must be a list of objects", param="messages") from None
        conversations = [entry if isinstance(entry, list) else [entry] for entry in decoded.values()]  # a batch has a list of them
        parts = [part for conversation in conversations for message in conversation for part in _parts(message)]
        urls = Counter(filter(None, map(_address, parts)))
        if not urls:
            return body
        if len(urls) > MOST_IMAGES:
            raise HarnessError(f"the request has {len(urls)} images by URL: at most {MOST_IMAGES} are fetched")
        fetched = _Fetched(holding, most)
        async with asyncio.TaskGroup() as group:
            fetches = {url: group.create_task(self._uri(session, url, fetched)) for url in urls}
        found = {url: fetch.result() for url, fetch in fetches.items()}
        written = 0
        for url, result in found.items():
            if isinstance(result, TokencacheError):
                raise result
            written += len(result) * urls[url]  # one image may be in many parts
        if len(body) + written > most:
            raise _too_large(most)
        holding.take("body", written)
        holding.give("media", fetched.size)
        for part in parts:
            if (uri := found.get(_address(part))) is not None:
                named = part["image_url"]
                part["image_url"] = {**named, "url": uri} if isinstance(named, dict) else uri
        rewritten = [Raw(msgspec.json.encode(decoded[index])) if index in decoded else Raw(raw) for index, raw in enumerate(messages)]
        return msgspec.json.encode({**fields, "messages": rewritten})

    def refuse_elsewhere(self, body: bytes) -> None:
        """Check that a request that is relayed names no address outside of its messages, except in texts.

        Raises:
            HarnessError: it does, or it cannot be read.
        """
        waiting: list[tuple[str, Any]] = [(name, value) for name, value in json_io.read_body(body).items() if name not in _WITHOUT_MEDIA]
        while waiting:
            match waiting.pop():
                case name, str(text) if name not in _TEXTS and _ADDRESS.match(text) and text[:5].lower() != "data:":
                    raise HarnessError(f"with --fetch-media, {name!r} cannot have an address on this route", param=name)
                case name, list(items):
                    waiting.extend((name, item) for item in items)
                case _, dict(members):
                    waiting.extend(members.items())

    async def _uri(self, session: str, url: str, fetched: "_Fetched") -> str | TokencacheError:
        """Return the data URI of an image, or why it cannot be fetched."""
        known = self._known.get((session, url))
        if known is None:
            try:
                async with asyncio.timeout(SECONDS):
                    known = await self._fetch(url, fetched)
            except TokencacheError as why:
                return why
            except TimeoutError:
                return _refusal(url, f"it took longer than {SECONDS:g} s")
            except aiohttp.TooManyRedirects:
                return _refusal(url, f"it has more than {MOST_REDIRECTS} redirects")
            except (aiohttp.ClientError, ValueError, OSError) as why:
                return _refusal(url, _described(why))
            self._known[session, url] = known
        return known

    async def _fetch(self, url: str, fetched: "_Fetched") -> str:
        """Fetch an image as a data URI.

        Raises:
            TokencacheError: the request becomes too large, or requests hold as much memory as they may.
            ValueError: it is too large, or the answer is not an image.
            aiohttp.ClientError: it cannot be fetched.
        """
        async with self._client().get(URL(url), max_redirects=MOST_REDIRECTS + 1) as answer:
            if answer.status != HTTPStatus.OK:
                raise ValueError(f"the server answered {answer.status}")
            if not answer.content_type.startswith("image/"):
                raise ValueError(f"the server sent {answer.content_type[:80]}, not an image")
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise ValueError("the server compressed it")
            content = bytearray()
            async for chunk in answer.content.iter_chunked(_CHUNK):
                fetched.add(len(chunk))
                content += chunk
                if len(content) > MOST_BYTES:
                    raise ValueError(f"it has more than {MOST_BYTES} bytes")
            return f"data:{answer.content_type};base64,{base64.b64encode(content).decode()}"

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MOST_CONNECTIONS, socket_factory=self._socket, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "tokencache"},
                auto_decompress=False,
            )
        return self._http

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        if not self._allows(str(address[4][0])):
            raise PermissionError("its address is not public")
        return socket.socket(*address[:3])


class _Fetched:
    """Counts what is fetched for one request; `size` is in bytes, without base64."""

    def __init__(self, holding: Holding, most: int) -> None:
        self._holding, self._most, self.size = holding, most, 0

    def add(self, size: int) -> None:
        """Count bytes before they are kept.

        Raises:
            HarnessError: the request becomes too large.
            MemoryFullError: requests hold as much memory as they may.
        """
        if self.size + size > self._most:
            raise _too_large(self._most)
        self._holding.take("media", size)
        self.size += size


def _too_large(most: int) -> HarnessError:
    return HarnessError(f"the request with its images is larger than {most} bytes (--max-body)", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def _parts(message: Any) -> list[dict[str, Any]]:
    """Return the parts of a decoded message that the engine may load."""
    content = message.get("content") if isinstance(message, dict) else None
    return list(filter(may_be_media, content)) if isinstance(content, list) else []


def _address(part: dict[str, Any]) -> str:
    """Return the URL of an image that is to be fetched; `""` for a part without an address.

    Raises:
        HarnessError: the part has an address that is not fetched.
    """
    named = part.get("image_url")
    url = named.get("url") if isinstance(named, dict) else named
    if not any(map(_is_address, _texts(part))) and not (isinstance(url, str) and url[:5].lower() != "data:"):
        return ""
    rest = {name: value for name, value in part.items() if name not in {"type", "image_url"}}
    others = {name: value for name, value in named.items() if name != "url"} if isinstance(named, dict) else {}
    if (
        part.get("type") != "image_url"
        or not isinstance(url, str)
        or not url.lower().startswith(_SCHEMES)
        or any(map(_is_address, _texts([rest, others])))
    ):
        raise HarnessError(
            "with --fetch-media, the only addresses in messages are images by http or https: "
            '{"type": "image_url", "image_url": {"url": "https://…"}}',
            param="messages",
        )
    return url


def _is_address(text: str) -> bool:
    """Whether a text in a part may be an address. Any text with a colon may: libraries ignore blanks and control characters in a scheme."""
    return ":" in text and text[:5].lower() != "data:"


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a decoded value."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str(text):
                yield text
            case list(items):
                waiting.extend(items)
            case dict(members):
                waiting.extend(members.values())


def _refusal(url: str, why: str) -> HarnessError:
    return HarnessError(f"the image at {_shown(url)} cannot be fetched: {why}", param="image_url")


def _shown(url: str) -> str:
    """Return a URL without what may be secret."""
    plain = url.partition("?")[0].partition("#")[0]
    scheme, _, rest = plain.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"[:200]


def _described(why: Exception) -> str:
    cause = why.os_error if isinstance(why, aiohttp.ClientConnectorError) else why
    return "its address is not public" if isinstance(cause, PermissionError) else f"{type(cause).__name__}: {cause}"[:200]
