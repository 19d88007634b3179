"""Replays a recording: the harness's requests again, against the real proxy before the simulated engine.

The engine says to each call what the model said when it was recorded, in tokens of its own that no tokenizer would choose.
What the harness echoed in later requests is as it was, so whether the proxy finds its replies again is really put to the
test. Two things cannot be as they were:

* ids and handles are the proxy's and new in every run. Recorded and replayed reply are walked in the same order
  (`replies`), and what stands for what is replaced in all later requests;
* where a harness left in mid-stream, the engine says what had been heard in the pieces in which it was heard, and then
  falls silent; we leave once we have heard as much.

Calls that ran side by side do so again: each is sent when those have ended that had ended then.
"""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

from tests.proxy.kit import CHAT, Rig, proxied, until
from tests.system.corpus.format import Call, Recording
from tests.system.corpus.replies import Reply, read_reply
from tokencache.testing import Fault, SimulatedEngine

SESSION = "replayed"
CONTEXT = 1 << 20
_MARKUP = re.compile(r"</?think>|<tool_call>.*", re.DOTALL)


@dataclass
class Replayed:
    """What came of a session: each call's turn by its number, the sequences by the calls in them, and the whole export."""

    turns: dict[int, dict[str, Any]]
    outcome: dict[str, Any]
    prompts: dict[int, tuple[int, ...]]
    """What the engine was asked, by its own books."""
    prefixes: dict[int, tuple[int, ...]]
    """The same with what was sampled behind it."""


class ReplayError(AssertionError):
    """A call cannot be replayed; the message says which and why."""


async def replay(recording: Recording, *, honours_ids: bool = True) -> Replayed:
    """Replay a session; `honours_ids=False` is an engine that renders every prompt itself, as without a proxy.

    Raises:
        ReplayError: the proxy answered otherwise than it had.
        AssertionError: its records are not what the engine's books say.
    """
    engine = SimulatedEngine(model=recording.header.model, max_model_len=CONTEXT, honours_ids=honours_ids, seed=11)
    _prepare(engine, recording.calls)
    async with proxied(engine) as rig:
        await _Session(recording, rig).run()
        names = {_name(call) for call in recording.calls}
        for entry in engine.ground_truth:
            if _named_in(entry.request_id) in names:
                entry.session = SESSION  # some harnesses send an X-Session-ID of their own
        left = sum(call.ended == "left" for call in recording.calls)
        return _outcome(recording, rig, await rig.check(SESSION, aborted=left))


def _prepare(engine: SimulatedEngine, calls: list[Call]) -> None:
    """Let the engine say what was said to the request that bears a call's name, and fall silent where the harness left."""
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
    """The call's name in the id that the proxy made of it."""
    return "-".join(request_id.removeprefix("chatcmpl-").split("-")[:2])


class _Session:
    """The harness's side of a session."""

    def __init__(self, recording: Recording, rig: Rig) -> None:
        self._recording, self._rig = recording, rig
        self._ended = {call.call: asyncio.Event() for call in recording.calls}
        self._renamed: dict[str, str] = {}

    async def run(self) -> None:
        """Send every call when its time has come."""
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
        """Hear as much as the harness had, leave, and wait until the proxy has noticed."""
        body, reply, wanted = b"", Reply(), len(_MARKUP.sub("", "".join(call.said)))
        while reply.heard < wanted:
            body += await answer.content.readany()
            whole = body.replace(b"\r\n", b"\n").rpartition(b"\n\n")
            reply = read_reply(self._recording.header.dialect, (whole[0] + whole[1]).decode(), stream=True)
        before = await self._gone()
        answer.close()

        async def noticed() -> bool:
            return await self._gone() > before

        await until(noticed)
        return reply

    async def _gone(self) -> int:
        """How many turns are recorded whose harness was gone before their end."""
        return sum("aborted" in turn["marks"] for turn in await self._rig.turns(SESSION))

    def _with_new_ids(self, body: str) -> str:
        if not self._renamed:
            return body
        longest_first = sorted(map(re.escape, self._renamed), key=len, reverse=True)
        return re.sub("|".join(longest_first), lambda found: self._renamed[found[0]], body)

    def _rename(self, call: Call, reply: Reply) -> None:
        recorded, replayed = call.served, reply.served[: len(call.served) if call.ended == "left" else None]
        if [member for member, _ in recorded] != [member for member, _ in replayed]:
            raise ReplayError(f"call {call.call}: the reply held {recorded}, and now {replayed}")
        self._renamed.update((old, new) for (_, old), (_, new) in zip(recorded, replayed, strict=True))


def _outcome(recording: Recording, rig: Rig, exported: dict[str, Any]) -> Replayed:
    """Put what was exported beside the calls; which turn is which call's, is in the engine's books."""
    entries = {int(_named_in(entry.request_id).removeprefix("call-")): entry for entry in rig.book(SESSION)}
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
    return Replayed(dict(sorted(turns.items())), outcome, prompts, prefixes)


def differences(recording: Recording, replayed: Replayed) -> list[str]:
    """What is not as it was recorded, in words."""
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
