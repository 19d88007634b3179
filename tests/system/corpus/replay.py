"""Replays a recording: sends the harness's requests again, to the real proxy in front of the simulated engine.

The engine answers each call with the recorded text, in tokens that no tokenizer would choose. What the harness echoed in later requests is
unchanged, so the replay tests whether the proxy recognises its replies. Two things cannot be unchanged:

* ids and handles are the proxy's and new in every run. Recorded and replayed reply are traversed in the same order (`replies`), and the
  new values replace the recorded ones in all later requests;
* where a harness left in mid-stream, the engine sends the delivered text in its recorded pieces and then stalls; the replay disconnects
  once it has received as much.

Calls that ran concurrently do so again: each is sent when the calls have ended that had ended then.
"""

import asyncio
import contextlib
import itertools
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.proxy.kit import CHAT, Rig, proxied
from tests.support.plugin_engine import PluginEngine
from tests.support.waiting import until
from tests.system.corpus.format import Call, Recording
from tests.system.corpus.replies import Reply, read_reply
from tokencache.testing import Fault, parser, wire

SESSION = "replayed"
CONTEXT = 1 << 20
_MARKUP = re.compile(r"</?think>|<tool_call>.*", re.DOTALL)


@dataclass
class Replayed:
    """The result of a session: each call's turn by its number, the sequences by the calls in them, and the whole export."""

    turns: dict[int, dict[str, Any]]
    outcome: dict[str, Any]
    prompts: dict[int, tuple[int, ...]]
    """The engine's prompts, from its own log."""
    prefixes: dict[int, tuple[int, ...]]
    """The same with the sampled ids after each."""
    exported: dict[str, Any]
    """The native trajectory."""

    def call_of(self, turn: str) -> int:
        """The number of the call whose turn has this id."""
        return next(number for number, one in self.turns.items() if one["turn"] == turn)


class ReplayError(AssertionError):
    """A call cannot be replayed; the message gives the call and the reason."""


async def replay(recording: Recording, *, honours_ids: bool = True) -> Replayed:
    """Replays a session; `honours_ids=False` is an engine that renders every prompt itself, as without a proxy.

    Raises:
        ReplayError: The proxy's answer differs from the recorded one.
        AssertionError: Its records differ from the engine's log.
    """
    images = recording.header.harness.endswith("_images")
    engine = PluginEngine(
        model=recording.header.model,
        max_model_len=CONTEXT,
        honours_ids=honours_ids,
        images="plugin" if images and honours_ids else "stock" if images else "",
        seed=11,
    )
    _prepare(engine, recording.calls)
    async with proxied(engine) as rig:
        with _ascending_ids():
            await _Session(recording, rig).run()
        names = {_name(call) for call in recording.calls}
        for entry in engine.ground_truth:
            if _named_in(entry.request_id) in names:
                entry.session = SESSION  # some harnesses send an X-Session-ID of their own
        left = sum(call.ended == "left" for call in recording.calls)
        return _outcome(recording, rig, await rig.check(SESSION, aborted=left))


@contextlib.contextmanager
def _ascending_ids() -> Iterator[None]:
    """The ids of the engine's calls ascend, as in the recordings: smolagents writes calls in the order of their ids."""
    numbers = itertools.count(1)

    def new_call_id() -> str:
        return f"chatcmpl-tool-{next(numbers):04x}{secrets.token_hex(6)}"

    with mock.patch.object(parser, "new_call_id", new_call_id), mock.patch.object(wire, "new_call_id", new_call_id):
        yield


def _prepare(engine: PluginEngine, calls: list[Call]) -> None:
    """Makes the engine answer each call with its recorded text, and stall where the harness left."""
    lines = {_name(call): [call.said] if isinstance(call.said, str) else call.said for call in calls}
    left = {_name(call) for call in calls if call.ended == "left"}

    def fault(route: str, _: Any) -> Fault | None:
        named = [value for name, value in engine.headers[-1].items() if name.lower() == "x-request-id"] if route == CHAT else []
        return Fault.stall() if any(_named_in(value) in left for value in named) else None

    engine.replies.script = lambda request: lines.get(_named_in(request.request_id))
    engine.choose_fault = fault


def _name(call: Call) -> str:
    return f"call-{call.call}"


def _named_in(request_id: str) -> str:
    """The call's name in the id that the proxy made from it."""
    return "-".join(request_id.removeprefix("chatcmpl-").split("-")[:2])


class _Session:
    """The harness's side of a session."""

    def __init__(self, recording: Recording, rig: Rig) -> None:
        self._recording, self._rig = recording, rig
        self._ended = {call.call: asyncio.Event() for call in recording.calls}
        self._renamed: dict[str, str] = {}

    async def run(self) -> None:
        """Sends every call when its time has come."""
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for call in self._recording.calls:
                group.create_task(self._call(call))

    async def _call(self, call: Call) -> None:
        for before in call.after:
            await self._ended[before].wait()
        header = self._recording.header
        body = self._with_new_ids(json.dumps(call.body))
        async with self._rig.http.request(
            call.method,
            f"{self._rig.url}/s/{SESSION}/h/{header.adapter}{call.path}",
            data=body.encode(),
            headers=call.headers | {"X-Request-Id": _name(call)},
        ) as answer:
            if answer.status != 200:
                raise ReplayError(f"call {call.call}: {answer.status} {await answer.text()}")
            if call.ended == "left":
                reply = await self._leave(call, answer)
            else:
                reply = read_reply(header.dialect, await answer.text(), stream=call.stream)
        self._rename(call, reply)
        self._ended[call.call].set()

    async def _leave(self, call: Call, answer: Any) -> Reply:
        """Receives as much as the harness had, disconnects, and waits until the proxy has noticed."""
        rest, reply, wanted = b"", Reply(), len(_MARKUP.sub("", "".join(call.said)))
        while reply.delivered_characters < wanted:
            got = (rest + await answer.content.readany()).replace(b"\r\n", b"\n")
            events, end, rest = got.rpartition(b"\n\n")
            read_reply(self._recording.header.dialect, (events + end).decode(), stream=True, reply=reply)
        before = await self._gone()
        answer.close()

        async def noticed() -> bool:
            return await self._gone() > before

        await until(noticed)
        return reply

    async def _gone(self) -> int:
        """How many recorded turns have a harness that disconnected before their end."""
        return sum("aborted" in turn["marks"] for turn in await self._rig.turns(SESSION))

    def _with_new_ids(self, body: str) -> str:
        if not self._renamed:
            return body
        longest_first = sorted(map(re.escape, self._renamed), key=len, reverse=True)
        return re.sub("|".join(longest_first), lambda found: self._renamed[found[0]], body)

    def _rename(self, call: Call, reply: Reply) -> None:
        recorded, replayed = call.served, reply.served[: len(call.served) if call.ended == "left" else None]
        if [member for member, _ in recorded] != [member for member, _ in replayed]:
            raise ReplayError(f"call {call.call}: the recorded reply has {recorded}, the replayed one {replayed}")
        self._renamed.update((old, new) for (_, old), (_, new) in zip(recorded, replayed, strict=True))


def _outcome(recording: Recording, rig: Rig, exported: dict[str, Any]) -> Replayed:
    """Joins the export with the calls; the engine's log shows which turn belongs to which call."""
    entries = {int(_named_in(entry.request_id).removeprefix("call-")): entry for entry in rig.ground_truth(SESSION)}
    turns, sequences = {}, []
    for sequence in exported["sequences"]:
        numbers = []
        for turn in sequence["turns"]:
            start, end = turn["completion"]
            ids = sequence["token_ids"]
            number = next(
                number
                for number, entry in entries.items()
                if entry.prompt_ids == ids[:start] and entry.completion_ids[: end - start] == ids[start:end] and number not in turns
            )
            turns[number] = turn
            numbers.append(number)
        sequences.append({"start": sequence["start"], "reason": sequence["reason"], "calls": numbers})
    outcome = {
        "complete": exported["complete"],
        "incidents": sorted(incident["kind"] for incident in exported["incidents"]),
        "sequences": sorted(sequences, key=lambda one: one["calls"]),
    }
    prompts = {number: tuple(entry.prompt_ids) for number, entry in entries.items()}
    prefixes = {number: (*prompts[number], *entry.completion_ids) for number, entry in entries.items()}
    return Replayed(dict(sorted(turns.items())), outcome, prompts, prefixes, exported)


def differences(recording: Recording, replayed: Replayed) -> list[str]:
    """The differences from the recording, in words."""
    found = []
    for call in recording.calls:
        turn = replayed.turns[call.call]
        is_now = {member: turn[member] for member in call.expected}
        if is_now != call.expected:
            found.append(f"call {call.call}: {is_now} instead of {call.expected}")
    for member, expected in recording.header.expected.items():
        if replayed.outcome[member] != expected:
            found.append(f"{member}: {replayed.outcome[member]} instead of {expected}")
    return found
