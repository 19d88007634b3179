"""Shares turns between a session and its forks: the tokens stay in the hash of the session that recorded them.

In place of ids and contexts a fork has *references*: the session that has them, and its epoch. They are read with a second script, because
a script reads the keys of one slot of a cluster only. A session with forks is renamed when it is deleted. A list of all forks says which of
such hashes are needed: who deletes a session removes what no fork needs any more, and each replica does so now and then for forks that
expired.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tokencache.core.turn import Turn, TurnMark
from tokencache.store.base import SessionGoneError, SessionInfo
from tokencache.store.clock import monotonic
from tokencache.store.encoding import pack, text, untext
from tokencache.store.redis import fields, scripts
from tokencache.store.redis.fields import REFERENCE, Decoding, turn_field

_ENTRY = msgspec.msgpack.Decoder(tuple[bytes, str, list[bytes]])
"""In the list: the name of a fork, its epoch, and the references that its turns may have."""


class Forks:
    """The forks of a store.

    Args:
        script: runs a script: name of the operation, script, keys, arguments.
        command: runs a command: name of the operation, command.
        states: reads the states of sessions.
        keys: the names of keys.
        ttl: milliseconds for which sessions live without use.
    """

    def __init__(
        self,
        script: Callable[..., Awaitable[Any]],
        command: Callable[..., Awaitable[Any]],
        states: Callable[[Sequence[str]], Awaitable[list[SessionInfo | None]]],
        keys: fields.Keys,
        ttl: int,
    ) -> None:
        self._script, self._command, self._states, self._keys = script, command, states, keys
        self._kept, self._pause = 2 * ttl, ttl / 8000
        self._ttl, self._next = ttl, monotonic() + self._pause

    async def add(self, fork: SessionInfo, source: SessionInfo, turns: Sequence[Turn]) -> None:
        """Record turns of a session in a fork (`Store.share`).

        Raises:
            SessionGoneError: one of the sessions has ended.
            KeyError: the source has no such turn.
        """
        own = fields.pack_reference(source.id, text(source.epoch))
        # Listed first, with all references that its turns may have: what no listed fork needs may be removed.
        held = await self._command("share", "HGET", self._keys.forks, text(source.id))
        with Decoding(source.id):
            inherited = _ENTRY.decode(held)[2] if held is not None else []
        entry = msgspec.msgpack.encode((text(fork.id), fork.epoch, [own, *inherited]))
        await self._command("share", "HSET", self._keys.forks, text(fork.id), entry)
        named = [turn_field(turn.id) for turn in turns]
        reply = await self._script("share", scripts.SHARE, [self._keys.session(source.id)], self._kept, text(source.epoch), *named)
        if len(reply) < len(turns):
            raise KeyError(turns[len(reply)].id)
        packed: list[bytes] = []
        for turn, field, reference in zip(turns, named, reply[: len(turns)], strict=True):
            packed += [field, b"" if turn.parent is None else turn_field(turn.parent), pack(turn), reference or own]
        history = {b"%d" % place for place, turn in enumerate(turns, 1) if TurnMark.NOT_IN_HISTORY not in turn.marks}
        for key, places in zip(reply[len(turns) :: 2], reply[len(turns) + 1 :: 2], strict=True):
            if kept := [place for place in places.split() if place in history]:
                packed += key, b" ".join(kept)
        counts = len({turn.call for turn in turns}), sum(turn.completion_tokens for turn in turns), len(turns)
        keys, head = [self._keys.session(fork.id)], (self._ttl, text(fork.epoch), *counts)
        if not await self._script("share", scripts.JOIN_SHARED, keys, *head, *packed):
            raise SessionGoneError(fork.id)

    async def follow(self, script: str, turns: Sequence[str], values: list[bytes], width: int) -> None:
        """Replace references in the answer of a script, which has `width` values for each turn, by what they refer to.

        Raises:
            KeyError: it is not there.
        """
        named: dict[bytes, list[int]] = {}
        for n in range(len(turns)):
            if values[n * width].startswith(REFERENCE):
                named.setdefault(values[n * width], []).append(n)
        for reference, places in named.items():
            found = await self._at(reference, script, [turn_field(turns[n]) for n in places], width * len(places))
            for place, n in enumerate(places):
                values[n * width] = found[place * width]

    async def follow_line(self, line: list[bytes]) -> None:
        """Continue the ids of a turn and its bases where they lead to another session. Raises `KeyError` if they are not there."""
        while len(line) > 1 and line[-2].startswith(REFERENCE):
            field, reference = line.pop(), line.pop()
            line += await self._at(reference, scripts.PREFIX, [field], 1)

    async def end(self, session: str, epoch: bytes) -> None:
        """Remove what a session that was deleted was the last to need, and its own turns, if no fork needs them."""
        ended, needed = {fields.pack_reference(session, epoch)}, set[bytes]()
        for name, its_epoch, references in await self._listed():
            (ended if (name, text(its_epoch)) == (session, epoch) else needed).update(references)
        if len(ended) > 1:  # it was listed
            await self._command("keep_forks", "HDEL", self._keys.forks, text(session))
        for reference in ended - needed:
            await self._command("keep_forks", "UNLINK", self._keys.holders(reference)[1])

    async def keep(self) -> None:
        """Let what forks share live on while one of them lives, and remove it after the last one if its session was deleted."""
        listed = await self._listed()
        infos = await self._states([name for name, _, _ in listed])
        dropped: set[bytes] = set()
        needed: set[bytes] = set()
        for (name, epoch, references), info in zip(listed, infos, strict=True):
            if info is not None and info.epoch == epoch:
                needed.update(references)
            else:
                dropped.update(references)
                await self._command("keep_forks", "HDEL", self._keys.forks, text(name))
        for reference in needed:
            for key in self._keys.holders(reference):
                await self._script("keep_forks", scripts.KEEP_SHARED, [key], self._kept, fields.unpack_reference(reference)[0])
        for reference in dropped - needed:
            await self._command("keep_forks", "UNLINK", self._keys.holders(reference)[1])

    async def keep_now_and_then(self) -> None:
        """Do that eight times in the time for which a session lives."""
        if monotonic() >= self._next:
            self._next = monotonic() + self._pause
            await self.keep()

    async def _listed(self) -> list[tuple[str, str, list[bytes]]]:
        """Read the names of all forks, their epochs, and the references that they may have."""
        held = await self._command("forks", "HVALS", self._keys.forks)
        with Decoding("with forks"):
            return [(untext(name), epoch, references) for name, epoch, references in map(_ENTRY.decode, held)]

    async def _at(self, reference: bytes, script: str, named: Sequence[bytes], least: int) -> list[bytes]:
        """Run a script that reads turns where a reference leads."""
        for key in self._keys.holders(reference):
            reply: list[bytes] = await self._script("shared", script, [key], *named)
            if len(reply) >= least:
                return reply
        raise KeyError(untext(named[0][1:]))
