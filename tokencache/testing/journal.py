"""Books that outlive their engine: every token is in a file before it goes out.

An engine that is killed in mid-stream takes the books in its memory with it, and just those say what was sampled and never
heard of again. A journal is appended to as generations grow, one line of JSON for each step, straight to the file: what the
operating system has taken, a SIGKILL does not take back. (A power cut would; nobody tests with that.)
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from tokencache.testing.books import BookEntry

if TYPE_CHECKING:
    from pathlib import Path

_HEAD = ("request_id", "index", "session", "model", "stream", "ids_supplied", "prompt_ids")
_STATE = ("finish_reason", "stop_reason", "aborted")


class Journal:
    """Appends to a file what is new in books; several engines, one after the other or at once, may share the file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._known: dict[int, tuple[str, BookEntry]] = {}
        self._written: dict[str, int] = {}

    def keep(self, entry: BookEntry) -> None:
        """Write what is new of an entry: all of it the first time."""
        name, _ = self._known.setdefault(id(entry), (f"{os.getpid()}-{len(self._known)}", entry))  # held: its `id` stays its own
        at = self._written.get(name)
        line: dict[str, Any] = {"entry": name} if at is not None else {"entry": name} | {field: getattr(entry, field) for field in _HEAD}
        line |= {"ids": entry.completion_ids[at or 0 :], "logprobs": entry.logprobs[at or 0 :]}
        line |= {field: getattr(entry, field) for field in _STATE}
        self._written[name] = len(entry.completion_ids)
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read_journal(path: Path) -> list[BookEntry]:
    """Read the books of all engines that kept them in a file, in the order in which generations began.

    Generations of which no token came are not in it. A last line that was torn by a crash is left out: its token never went out.
    """
    books: dict[str, BookEntry] = {}
    for raw in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        line = json.loads(raw)
        if line["entry"] not in books:
            books[line["entry"]] = BookEntry(**{field: line[field] for field in _HEAD})
        entry = books[line["entry"]]
        entry.completion_ids += line["ids"]
        entry.logprobs += line["logprobs"]
        for field in _STATE:
            setattr(entry, field, line[field])
    return list(books.values())
