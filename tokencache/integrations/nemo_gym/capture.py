"""Keeps NeMo Gym's token capture in a store of tokencache, so that Gym's servers and the trainer may run on several machines.

    token_id_capture:
      enabled: true
      sink: tokencache.integrations.nemo_gym.capture:CaptureSink
      sink_kwargs: {url: redis://redis:6379/1}
      lineage_store: tokencache.integrations.nemo_gym.capture:CaptureResolver
      lineage_store_kwargs: {url: redis://redis:6379/1}
      rebuild_response: false  # or install_token_source(ProvingSource(CaptureSource(url))) in the process that collects the rollouts

A rollout is a session of the store, a call of Gym is a call of it, and the record of the call (`TokenEntry`) is the context of a turn,
named by the call and by the hash of the record. So a record that is put twice is one turn, and two records for one call are two, which
every reader sees: the rollout is incomplete, and neither of them is a parent.

Use a database of its own: these sessions are no rollouts that the proxy could export.

Source: nemo-gym 0.7.0, `token_id_capture/protocols.py`; its `run_conformance` checks these classes (`tests/system/nemo/test_capture.py`).
"""

import asyncio
import functools
import hashlib
from collections import Counter
from typing import Any

import msgspec

from tokencache.core import ids
from tokencache.core.incidents import Incident
from tokencache.core.turn import Tokens, Turn
from tokencache.integrations.nemo_gym.gym_package import gym
from tokencache.integrations.nemo_gym.proving import cumulative
from tokencache.store import open_store
from tokencache.store.base import Entry, SealOutcome, Store
from tokencache.store.clock import RECORD_CLOCK

NO_TOKENS = Tokens(ids.pack([]), ids.pack([]))
"""The tokens of a turn here: they are in its record."""


class CaptureError(ValueError):
    """A call has another record already; the message names the call and its rollout. The rollout is incomplete."""


class _Client:
    """A client of the store. It connects at the first use, because Gym makes it before its event loop runs.

    Args:
        url: of the store: `redis://…`, `file:PATH`, or `memory:` (which all clients of a process share).
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._store: Store | None = None
        self._opening = asyncio.Lock()

    async def _opened(self) -> Store:
        async with self._opening:
            if self._store is None:
                store = _memory() if self._url == "memory:" else open_store(self._url)
                await store.open()
                self._store = store
            return self._store

    async def _entries(self, session: str, turns: list[str]) -> list[Any]:
        """Read the records of these turns."""
        if not turns:
            return []
        contexts = await (await self._opened()).contexts(session, turns)
        return [gym.TokenEntry.model_validate(msgspec.json.decode(contexts[turn])) for turn in turns]

    async def close(self) -> None:
        """Disconnect. Repeating it changes nothing."""
        if self._store is not None:
            await self._store.close()
            self._store = None


class CaptureSink(_Client):
    """Gym's `TokenSink`, with the optional `begin_call` and `record_engine_refusal`. A store that fails raises `StoreError`."""

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Record that a call begins. A rollout with a call that has begun and not ended is incomplete.

        Raises:
            SessionFinishedError, SessionSealedError, SessionDeletedError: the rollout is frozen or retired. Gym then fails the call.
        """
        await (await self._opened()).begin(_session(rollout_id), model_call_id, [])

    async def put(self, entry: Any) -> None:
        """Store the record of a call (`TokenEntry`). Repeating it changes nothing.

        Raises:
            CaptureError: the call has another record.
            SessionFinishedError, SessionSealedError, SessionDeletedError: the rollout is frozen or retired.
        """
        store, session, call = await self._opened(), _session(entry.rollout_id), entry.model_call_id
        record = msgspec.json.encode(entry.model_dump(mode="json"), order="sorted")
        turn = f"{call}:{hashlib.sha256(record).hexdigest()}"
        begun = await store.begin(session, call, [_call_key(call)])
        recorded = {hit.turn.id for hit in begun.hits[0]}
        if recorded:
            incidents = [] if recorded == {turn} else [_hole("another record for one call", call)]
            await store.settle(session, begun.epoch, call, incidents)
            if incidents:
                raise CaptureError(f"call {call} of rollout {entry.rollout_id} has another record")
            return
        keys = [_call_key(call)]
        if entry.continuation_fingerprint:
            keys.append(_reply_key(entry.continuation_fingerprint))
        stored = Entry(Turn(id=turn, call=call, match="root", created=RECORD_CLOCK.now()), NO_TOKENS, tuple(keys), record)
        await store.commit(session, begun.epoch, call, [stored])

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Record that a call was not captured, also after a freeze."""
        await (await self._opened()).add_incidents(_session(rollout_id), [_hole("a call was not captured", model_call_id)])

    async def record_engine_refusal(self, rollout_id: str, *, model_call_id: str, code: object, **_: object) -> None:
        """End a call that the engine refused: nothing was sampled, so nothing is missing. Gym's main branch calls this, 0.7.0 does not."""
        store, session = await self._opened(), _session(rollout_id)
        begun = await store.begin(session, model_call_id, [])
        refused = Incident("gym-engine-refused", str(code), call=model_call_id, at=RECORD_CLOCK.now())
        await store.settle(session, begun.epoch, model_call_id, [refused])


class CaptureSource(_Client):
    """Gym's `TokenSource`. A version counts turns and incidents, so it grows with every write."""

    async def freeze(self, rollout_id: str) -> Any:
        """Accept no new calls, and return the records. They are incomplete if a call is open, was not captured, or has two records."""
        store, session = await self._opened(), _session(rollout_id)
        await store.finish(session)
        while True:
            turns = await store.turns(session)
            info = await store.session(session)
            if info is None:
                return gym.TokenCaptureSnapshot(rollout_id, (), incomplete=False, snapshot_id="none", version=0)
            if info.turns == len(turns):  # else a call that was in flight has ended between the two reads
                break
        records = Counter(turn.call for turn in turns)
        entries = await self._entries(session, [turn.id for turn in turns if records[turn.call] == 1])
        incomplete = bool(info.open_calls) or len(records) < len(turns) or any(incident.hole for incident in info.incidents)
        version = info.turns + len(info.incidents)
        return gym.TokenCaptureSnapshot(rollout_id, tuple(entries), incomplete, snapshot_id=info.epoch, version=version)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Delete the rollout if nothing has been written since that snapshot. Late writers are then refused while the tombstone lasts."""
        store, session = await self._opened(), _session(rollout_id)
        for sealed in (False, True):  # once more after sealing, which no call can pass
            info = await store.session(session)
            if info is None or (info.epoch, info.turns + len(info.incidents)) != (snapshot_id, version):
                return False
            if not sealed and await store.seal(session) is not SealOutcome.SEALED:
                return False
        return await store.delete(session)


class CaptureResolver(_Client):
    """Gym's `LineageResolver`: Gym's own matcher (`RolloutLineage`) over the records with the fingerprint of the request."""

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        """Return whether the request is a root, or continues a recorded call, or neither is certain (`LineageResolution`)."""
        lineage, fingerprint = gym.RolloutLineage(), gym.assistant_fingerprint(request_items)
        if fingerprint:
            for entry in await self._candidates(_session(rollout_id), fingerprint):
                lineage.add_entry(entry)
        return lineage.resolve(request_items)

    async def _candidates(self, session: str, fingerprint: str) -> list[Any]:
        """The records with this fingerprint, with whole prompts; none of a call that has two records."""
        store = await self._opened()
        (hits,) = await store.find(session, [_reply_key(fingerprint)])
        turns = {hit.turn.id: hit.turn.call for hit in hits}
        records = await store.find(session, [_call_key(call) for call in turns.values()])
        single = [turn for turn, found in zip(turns, records, strict=True) if {hit.turn.id for hit in found} == {turn}]
        entries = await self._entries(session, single)
        if not any(entry.prompt_is_delta for entry in entries):
            return entries
        recorded = await store.turns(session)
        sequences = cumulative(await self._entries(session, [turn.id for turn in recorded]))
        return [_whole(entry, sequences[entry.model_call_id]) for entry in entries if entry.model_call_id in sequences]

    def is_process_shared(self) -> bool:
        """Whether other processes see the same records."""
        return self._url != "memory:"


@functools.cache
def _memory() -> Store:
    return open_store("memory:")


def _session(rollout_id: str) -> str:
    """The session of a rollout. Raises `ValueError` if Gym does not accept this id."""
    return f"gym-capture-{gym.validate_rollout_id(rollout_id)}"


def _call_key(call: str) -> bytes:
    return b"g" + call.encode()


def _reply_key(fingerprint: str) -> bytes:
    return b"h" + fingerprint.encode()


def _hole(detail: str, call: str) -> Incident:
    return Incident("gym-capture-incomplete", detail, hole=True, call=call, at=RECORD_CLOCK.now())


def _whole(entry: Any, sequence: list[int]) -> Any:
    """The record with its whole prompt; `sequence` is its prompt and completion."""
    prompt = sequence[: len(sequence) - len(entry.generation_token_ids)]
    return entry.model_copy(update={"prompt_token_ids": prompt, "prompt_is_delta": False})
