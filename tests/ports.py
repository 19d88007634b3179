"""Ports for servers that tests start, stop and start again at the same address.

They are below the ports that Linux hands out by itself (from 32768 on): no client's connection gets one while its server is stopped. A
process hands them out in turn, and keeps each: it locks the byte of the port in a file that all runs of a user share.
"""

import fcntl
import itertools
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

_HOST = "127.0.0.1"
_LOCKS = os.open(Path(tempfile.gettempdir(), f"tokencache-test-ports-{os.getuid()}"), os.O_RDWR | os.O_CREAT)


def _in_turn(first: int, end: int) -> Iterator[int]:
    start = first + secrets.randbelow(end - first)  # most ports are free at the first look
    return itertools.cycle([*range(start, end), *range(first, start)])


_redis_ports, _ports = _in_turn(20_000, 22_500), _in_turn(22_500, 30_000)


def free_port(host: str = _HOST) -> int:
    return next(port for port in _ports if _is_kept(port) and _is_free(host, port))


def free_redis_port() -> int:
    """A port for a Redis server: as a node of a cluster, it also uses the one 10,000 above it."""
    return next(port for port in _redis_ports if _is_kept(port) and _is_free(_HOST, port) and _is_free(_HOST, port + 10_000))


def _is_kept(port: int) -> bool:
    """Whether this process has the port, from now on or since before; the lock ends with the process."""
    try:
        fcntl.lockf(_LOCKS, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
