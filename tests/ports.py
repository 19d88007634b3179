"""Ports for servers that tests start, stop and start again at the same address."""

import contextlib
import secrets
import socket

FIRST, COUNT = 20_000, 12_000
"""Below the ports that Linux hands out by itself (from 32768 on): tests of another worker, which ask for port 0, never get these."""


def free_port(host: str = "127.0.0.1") -> int:
    while True:
        port = FIRST + secrets.randbelow(COUNT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
