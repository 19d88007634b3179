"""Writes routed experts to files for the trainer, outside of the store.

A turn's expert routing is much larger than its tokens, so it is written to the trainer's directory or object store. The turn stores a path
relative to the root that the option `--experts` names: `<session>/<call>-<choice>.npy`. So a trainer may mount the root elsewhere. (If the
engine's value is not a `.npy` file in base64, the suffix is `.json` and the file contains the value as JSON.)

A prompt repeats the history. So a request names the first token whose experts are not stored yet (`routed_experts_prompt_start`), and a
file contains only the rows from there on (`core.experts`). If an engine ignores the member and returns all rows, the others are cut off.

A file is complete before its turn is recorded. If the file cannot be written, the turn has no path, the session gets an incident
`experts-lost`, and the tokens are recorded as usual. Files are removed when their session is deleted. They stay when a session expires,
because a store does not report expired sessions.
"""

import asyncio
import binascii
import contextlib
import logging
import secrets
import shutil
from pathlib import Path
from typing import Protocol

import msgspec

from tokencache.core import experts
from tokencache.core.incidents import IncidentKind
from tokencache.dialects.chat.request import ChatCall
from tokencache.errors import extra_missing
from tokencache.proxy.facts import CallFacts
from tokencache.proxy.recorder import expert_rows

log = logging.getLogger(__name__)

_BLOCK = 2**20
"""Number of characters that are decoded at once; a multiple of 4."""
_NPY = b"\x93NUMPY"
_FIRST = "routed_experts_prompt_start"
"""The member of a request (vLLM 0.32, `chat_completion/protocol.py`); 400 if it is larger than the prompt's number of tokens."""


class ExpertFiles(Protocol):
    """Writes and removes files. All methods block, and raise the errors of the medium. Paths are relative, with `/`."""

    def put(self, path: str, data: bytearray) -> None:
        """Write a file; after a failure no part of it remains."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents; ignore it if it does not exist."""


class LocalFiles:
    """Writes files to a directory of this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".{secrets.token_hex(4)}"
        probe.touch()  # so that a wrong directory fails at start
        probe.unlink()

    def put(self, path: str, data: bytearray) -> None:
        """See `ExpertFiles.put`."""
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
        """See `ExpertFiles.remove`."""
        target = self._root / path
        with contextlib.suppress(FileNotFoundError):
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink()


class ObjectFiles:
    """Writes files to an object store that fsspec knows (`s3://bucket/path`, `gs://…`), which writes an object completely or not at all."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415 - needs the extra `experts`
        except ModuleNotFoundError as why:
            raise ValueError(extra_missing(f"--experts {url}", "experts", why.name)) from why
        self._files, self._root = url_to_fs(url)

    def put(self, path: str, data: bytearray) -> None:
        """See `ExpertFiles.put`."""
        self._files.pipe_file(f"{self._root}/{path}", bytes(data))

    def remove(self, path: str) -> None:
        """See `ExpertFiles.remove`."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{path}", recursive=True)


def open_files(where: str) -> ExpertFiles:
    """Open the value of `--experts`: a directory, or a URL for fsspec.

    Raises:
        ValueError: fsspec is not installed, or does not know the URL.
        OSError: the directory cannot be written to.
    """
    return ObjectFiles(where) if "://" in where else LocalFiles(Path(where))


def as_file(experts: bytes) -> tuple[bytearray, str]:
    """Decode routed experts to the bytes and suffix of a file: `.npy` for such a file in base64, `.json` for anything else."""
    file = bytearray()
    try:
        for at in range(0, len(experts), _BLOCK):  # in blocks, so that other threads can run in between
            file += binascii.a2b_base64(experts[at : at + _BLOCK], strict_mode=True)
    except binascii.Error:
        file.clear()
    if file.startswith(_NPY):
        return file, ".npy"
    return bytearray(experts if experts[:1] in {b"[", b"{"} else b'"%s"' % experts), ".json"


def request_experts(call: ChatCall, start: int) -> ChatCall:
    """Request routed experts from a token of the prompt on. A harness's own wish does not count, because it receives none."""
    fields = {name: value for name, value in call.fields.items() if name != _FIRST}
    if start:
        fields[_FIRST] = msgspec.Raw(b"%d" % start)
    return msgspec.structs.replace(call, fields=fields)


def _from_first_new(file: bytearray, tokens: int, asked: int) -> tuple[bytearray, int]:
    """Cut the rows that other files have from a `.npy` file. Returns the file and its first token; a file that is not clear stays whole."""
    try:
        rows = experts.read_npy(file)
    except ValueError as why:
        log.warning("routed experts are stored as they are: %s", why)
        return file, experts.UNPLACED
    start = experts.placed(len(rows), tokens, asked)
    if start == experts.UNPLACED:
        log.warning("routed experts are stored as they are: %d rows for %d tokens, from token %d on", len(rows), tokens, asked)
    elif start < asked:
        return bytearray(rows.between(asked, len(rows)).as_npy()), asked
    return file, start


class RoutedExperts:
    """Writes and removes the files of routed experts."""

    def __init__(self, files: ExpertFiles) -> None:
        self._files = files

    async def keep(self, facts: CallFacts) -> dict[int, tuple[str, int]]:
        """Write a reply's routed experts; a failure becomes an incident of the call. Returns what its turns say (`CallFacts.experts`)."""
        call, written = facts.call, dict[int, tuple[str, int]]()
        for index, choice in sorted(facts.reply.choices.items()):
            if not choice.experts:
                continue
            piece, choice.experts = choice.experts, b""
            tokens, asked = expert_rows(facts, choice)
            try:
                written[index] = await asyncio.to_thread(self._put, f"{call.session}/{call.id}-{index}", piece, tokens, asked)
            except Exception as why:  # the medium may raise anything; the tokens are recorded in any case
                log.exception("session %s call %s: routed experts cannot be written", call.session, call.id)
                call.note(IncidentKind.EXPERTS_LOST, f"choice {index}: {type(why).__name__}: {why}")
        return written

    def _put(self, name: str, piece: bytes, tokens: int, asked: int) -> tuple[str, int]:
        """Write a file. Returns its path, and the first token that it has a row for (`Turn.experts_start`)."""
        data, suffix = as_file(piece)
        start = experts.UNPLACED
        if suffix == experts.SUFFIX:
            data, start = _from_first_new(data, tokens, asked)
        self._files.put(name + suffix, data)
        return name + suffix, start

    async def drop(self, paths: list[str]) -> None:
        """Remove files, or a session's folder; a failure is logged."""
        for path in paths:
            try:
                await asyncio.to_thread(self._files.remove, path)
            except Exception:
                log.exception("routed experts at %s cannot be removed", path)
