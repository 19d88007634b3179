"""Ports for servers that tests start, stop and start again at the same address.

They are below the ports that Linux hands out by itself (from 32768 on): no client's connection gets one while its server is stopped. Each
worker of pytest has ports of its own, and hands them out in turn.
"""

import itertools
import os
import secrets
import socket
from collections.abc import Iterator

WORKERS = 16
_HOST = "127.0.0.1"


def _in_turn(first: int, end: int) -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = range(first + worker % WORKERS, end, WORKERS)
    start = secrets.randbelow(len(own))  # runs at the same time begin at different ports
    return itertools.cycle([*own[start:], *own[:start]])


_redis_ports, _ports = _in_turn(20_000, 22_500), _in_turn(22_500, 30_000)


def free_port(host: str = _HOST) -> int:
    return next(port for port in _ports if _is_free(host, port))


def free_redis_port() -> int:
    """A port for a Redis server: as a node of a cluster, it also uses the one 10,000 above it."""
    return next(port for port in _redis_ports if _is_free(_HOST, port) and _is_free(_HOST, port + 10_000))


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
