"""Shared parts of the commands: the options that name a proxy, the exit after an error, and texts for counts and sizes."""

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from tokencache.client import Client, ClientError, UnreachableError
from tokencache.trajectories.formats.registry import TRACES
from tokencache.trajectories.formats.traces import BLOCK_SIZE

PROXY_URL = "http://127.0.0.1:8100"
TIMEOUT = 600.0
"""Seconds to wait for one response. A rollout may be large."""

ProxyOption = Annotated[str, typer.Option("--proxy", envvar="TOKENCACHE_PROXY", metavar="URL", help="Base URL of the proxy, without /v1.")]
AdminKeyOption = Annotated[
    str | None, typer.Option("--admin-key", envvar="TOKENCACHE_ADMIN_KEY", metavar="KEY", help="Admin key of the proxy, if it has one.")
]
PatternOption = Annotated[
    str,
    typer.Option("--pattern", help="Only sessions whose names match this shell pattern: 'run7-*'.", metavar="PATTERN", show_default=False),
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option("--block-size", min=1, metavar="N", help=f"Tokens of a block of a trace ({', '.join(TRACES)}); default {BLOCK_SIZE}."),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_MEGABYTE = 1_000_000
_CONTROL = re.compile(r"[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""Characters that JSON may contain, and that control a terminal or change the order of what it shows."""


def output() -> Console:
    """Return a console on standard output. Lines are as wide as the terminal. If a program reads them, they are never wrapped."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=10_000)


def print_line(console: Console, words: str, style: str = "") -> None:
    """Print a line as it is: without markup, and never wrapped. It cannot control the terminal."""
    console.print(printable(words, keep="\n"), style=style, highlight=False, markup=False, soft_wrap=True)


def print_json(value: Any, *, indent: int = 2) -> None:
    """Print a value (structs included) as JSON, without blanks if `indent` is negative. What could control the terminal is escaped."""
    written = msgspec.json.format(msgspec.json.encode(value), indent=indent)
    typer.echo(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", written.decode()))


def failed(error: Exception | str, command: str = "tokencache") -> typer.Exit:
    """Print an error and return the exit with code 1 for the caller to raise."""
    typer.secho(printable(f"{command}: {said(error)}", keep="\n"), fg="red", err=True)
    return typer.Exit(1)


def said(error: Exception | str) -> str:
    """Return the words of an error, without the route of the proxy that was asked: the user of a command asked for none."""
    hint = " (--proxy URL)" if isinstance(error, UnreachableError) else ""
    return error.reason + hint if isinstance(error, ClientError) else str(error)


@contextlib.contextmanager
def calling(proxy: str, admin_key: str | None, *, timeout: float = 60.0) -> Iterator[Client]:
    """Yield a client, which waits so many seconds for a response. An error of the proxy is printed, and ends the command."""
    try:
        with Client(proxy, admin_key, timeout=timeout) as client:
            yield client
    except ClientError as error:
        raise failed(error) from None


@contextlib.contextmanager
def connecting(proxy: str, admin_key: str | None) -> Iterator[Callable[[], Client]]:
    """Yield a function that returns a client, which is made at its first call: a command that reads only files needs no proxy."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda: stack.enter_context(Client(proxy, admin_key, timeout=TIMEOUT)))


@contextlib.contextmanager
def warned() -> Iterator[None]:
    """Print warnings of the client as the command's own."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    for one in found:
        typer.secho(printable(f"tokencache: {one.message}", keep="\n"), fg="yellow", err=True)


def plural(n: int, noun: str) -> str:
    """Write a count: `1 turn`, `2 turns`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def size(n: int) -> str:
    """Write a number of bytes: `1.5 MB`."""
    return f"{n / _MEGABYTE:,.1f} MB" if n >= _MEGABYTE else f"{n / 1000:,.1f} KB"


def printable(text: str, keep: str = "") -> str:
    """Replace control characters by blanks, except those in `keep`, so that texts of files and harnesses cannot control the terminal."""
    return "".join(c if c.isprintable() or c in keep else " " for c in text)
