"""Experts: the files in which routed experts are kept for the trainer, beside the store.

A turn's routing is larger than all its tokens by far, so it goes to a directory or an object store of the trainer's, and the
turn holds a reference to it: a path below the root that the option names, `<session>/<call>-<choice>.npy`. Whoever mounts the
root elsewhere finds the same files. (`.json` where what the engine gave is no `.npy` file in base64: then its own JSON.)

A file stands before the turn that refers to it is recorded, or the turn refers to nothing: then the session has an incident
`experts-lost`, the tokens are recorded all the same, and the call goes well. Files go when their session is deleted. A session that
merely expires leaves them: what a store forgets by itself it cannot tell.
"""

import asyncio
import contextlib
import logging
import secrets
import shutil
from pathlib import Path
from typing import Protocol

from tokencache.dialects.routing import unpacked
from tokencache.errors import extra_missing
from tokencache.proxy.recorder import Outcome

log = logging.getLogger(__name__)

LOST = "experts-lost"


class Shelf(Protocol):
    """Where files are; all methods block, and raise whatever the place raises. Paths are relative, with `/`."""

    def put(self, path: str, data: bytearray) -> None:
        """Write a file; it is there whole or not at all."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing if it is not there."""


class Folder:
    """A directory of this machine's."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".{secrets.token_hex(4)}"
        probe.touch()  # better told now than with the first turn
        probe.unlink()

    def put(self, path: str, data: bytearray) -> None:
        """See `Shelf.put`."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            unfinished.write_bytes(data)
            unfinished.replace(target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def remove(self, path: str) -> None:
        """See `Shelf.remove`."""
        target = self._root / path
        with contextlib.suppress(FileNotFoundError):
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink()


class Bucket:
    """A place that fsspec knows: `s3://bucket/path`, `gs://…`; an object is there when it is whole."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415 - needs the extra `experts`
        except ModuleNotFoundError as why:
            raise ValueError(extra_missing(f"--experts {url}", "experts", why.name)) from why
        self._files, self._root = url_to_fs(url)

    def put(self, path: str, data: bytearray) -> None:
        """See `Shelf.put`."""
        self._files.pipe_file(f"{self._root}/{path}", bytes(data))

    def remove(self, path: str) -> None:
        """See `Shelf.remove`."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{path}", recursive=True)


def open_shelf(where: str) -> Shelf:
    """Open the place that the option names: a directory, or a URL for fsspec.

    Raises:
        ValueError: fsspec is not installed, or does not know the URL.
        OSError: the directory cannot be written to.
    """
    return Bucket(where) if "://" in where else Folder(Path(where))


class Experts:
    """Keeps routed experts on a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def keep(self, outcome: Outcome) -> None:
        """Write what a reply says of experts, and let its turns refer to it; what fails is an incident of the call."""
        for index, choice in sorted(outcome.reply.choices.items()):
            if not choice.experts:
                continue
            piece, choice.experts = choice.experts, b""
            try:
                outcome.experts[index] = await asyncio.to_thread(self._put, f"{outcome.session}/{outcome.call_id}-{index}", piece)
            except Exception as why:  # whatever the place raises: the tokens are recorded all the same
                log.exception("session %s call %s: experts not kept", outcome.session, outcome.call_id)
                outcome.noted.append(outcome.tell(LOST, f"choice {index}: {type(why).__name__}: {why}"))

    def _put(self, name: str, piece: bytes) -> str:
        data, suffix = unpacked(piece)
        self._shelf.put(name + suffix, data)
        return name + suffix

    async def drop(self, paths: "list[str]") -> None:
        """Remove files, or a session's folder; what fails is logged."""
        for path in paths:
            try:
                await asyncio.to_thread(self._shelf.remove, path)
            except Exception:
                log.exception("experts at %s are not removed", path)
