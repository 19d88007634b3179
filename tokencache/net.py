"""Helpers for connections: TCP keep-alive, and the HTTP headers that are passed on from one connection to the next.

While a reply that is not streamed is sampled, nothing is sent over HTTP for minutes. So TCP probes the other side from time to time. The
probes keep NAT and load balancers from dropping the connection, and detect a machine that is gone. A slow process does not look dead,
because its kernel answers the probes.
"""

import socket
from collections.abc import Mapping

from multidict import CIMultiDict

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


def end_to_end_headers(headers: Mapping[str, str], *, drop: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """Copy headers, without those of one connection (RFC 9110 §7.6.1) and those in `drop` (lower case)."""
    left_out = _HOP_BY_HOP | drop
    if "Connection" in headers:
        left_out |= {name.strip().lower() for name in headers["Connection"].split(",")}
    return CIMultiDict([(name, value) for name, value in headers.items() if name.lower() not in left_out])
