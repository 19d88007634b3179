"""Helpers for connections: TCP keep-alive, and what is passed on between two of them: headers, and texts without an engine's address.

While a reply that is not streamed is sampled, nothing is sent over HTTP for minutes. So TCP probes the other side from time to time. The
probes keep NAT and load balancers from dropping the connection, and detect a machine that is gone. A slow process does not look dead,
because its kernel answers the probes.
"""

import re
import socket
from collections.abc import Mapping

from multidict import CIMultiDict
from yarl import URL

_PROBES = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""Linux's tcp(7): seconds of silence before the first probe, seconds between probes, probes without an answer: two minutes in all."""
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


def keep_alive(sock: socket.socket) -> None:
    """Let TCP probe a silent connection; connections that a listening socket accepts inherit it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def is_base_url(given: str) -> bool:
    """Whether this can be the base URL of a server: http or https, with a host and a valid port, and without query and fragment."""
    try:
        url = URL(given)
    except ValueError:
        return False
    return url.scheme in {"http", "https"} and bool(url.host) and not (url.query_string or url.fragment or " " in given)


def check_header_name(name: str) -> str:
    """Return the name of a header if it is valid (RFC 9110 §5.6.2).

    Raises:
        ValueError: no request can have such a header.
    """
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a header: use letters, digits and -")
    return name


def end_to_end_headers(headers: Mapping[str, str], *, drop: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """Copy headers, without those of one connection (RFC 9110 §7.6.1) and those in `drop` (lower case)."""
    left_out = _HOP_BY_HOP | drop
    if "Connection" in headers:
        left_out |= {name.strip().lower() for name in headers["Connection"].split(",")}
    copied: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in left_out:
            copied.add(name, value)
    return copied


_ADDRESS = re.compile(r"(?<![\w.-])(https?://)?(\[[0-9A-Fa-f:.]++\]|[\w.-]++)(?::(\d{1,5}+))?(?!\w)(?=(/?))", re.IGNORECASE)


def without_address(text: str, engine: URL) -> str:
    """Return a text of an engine, such as a header or an error, without the engine's address.

    `http://10.0.0.3:8000/v1` becomes `/v1`, so that a link leads to the same path at the proxy. An address alone becomes `engine`.
    """
    ours, ports = (engine.host_subcomponent or "").lower(), {str(engine.port), *([None] if engine.is_default_port() else [])}

    def replaced(found: re.Match[str]) -> str:
        scheme, host, port, slash = found.groups()
        bare = host.rstrip(".")  # the end of a sentence
        if bare.lower() != ours or port not in ports or not (scheme or port):
            return found[0]
        return ("" if scheme and slash else "engine") + host[len(bare) :]

    return _ADDRESS.sub(replaced, text)
