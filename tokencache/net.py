"""Quiet connections: what keeps one alive on which nothing is said.

While a reply that is not streamed is sampled, nothing can be said over HTTP, for minutes. TCP itself can ask now and then whether the other
side is there. That keeps the address tables between (NAT, load balancers) from forgetting the connection, and finds out that the other
machine is gone, where nothing else would. A slow process is not taken for a dead one: it is its kernel that answers.
"""

import socket

_PROBES = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""Linux's tcp(7): seconds of quiet before the first probe, seconds between probes, probes without an answer: two minutes in all."""


def keep_alive(sock: socket.socket) -> None:
    """Have TCP probe a quiet connection; those that a listening socket accepts inherit it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
