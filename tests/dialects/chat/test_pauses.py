"""Calls that are read with pauses: what runs in between changes no call, and no part is long."""

import asyncio
import json
import random
from collections.abc import Coroutine, Iterable
from typing import Any

import pytest

from tests.support.reading import at_once
from tests.support.reading import read_chat as read_at_once
from tokencache import pauses
from tokencache.dialects.chat import request
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.vocabulary import MessageReader, ReadMessage

Reading = Coroutine[Any, Any, ChatCall]


@pytest.fixture(autouse=True)
def _stepwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run the coroutines from pause to pause, without an event loop."""
    monkeypatch.setattr(pauses, "_end_of_pause", lambda: asyncio.sleep(0))


def _messages(rng: random.Random, number: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": f"{rng.random()} " * rng.choice((1, 20, 400))} for place in range(number)]


def _body(messages: list[dict[str, Any]], *, temperature: float, tools_first: bool) -> bytes:
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    first, last = (tools, {}) if tools_first else ({}, tools)
    return json.dumps({"model": "m", **first, "messages": messages, "temperature": temperature, **last}).encode()


class _Counted(MessageReader):
    """Counts the messages that are read."""

    reads = 0

    def read(self, entries: Iterable[bytes]) -> list[ReadMessage]:
        read = super().read(entries)
        self.reads += len(read)
        return read


def test_at_most_32_messages_are_read_between_two_pauses() -> None:
    counted, most = _Counted(), 0
    body = _body(_messages(random.Random(1), 300), temperature=0.5, tools_first=False)
    reading = request.read_chat(body, IncrementalParser(counted), "s")
    while counted.reads < 300:
        before = counted.reads
        reading.send(None)
        most = max(most, counted.reads - before)
    reading.close()
    assert most <= 32


def test_a_short_history_has_no_pause() -> None:
    reading = request.read_chat(_body(_messages(random.Random(1), 8), temperature=0.5, tools_first=False), IncrementalParser(), "s")
    with pytest.raises(StopIteration):
        reading.send(None)


@pytest.mark.parametrize("seed", range(12))
def test_calls_of_one_session_that_are_read_in_turn_are_read_as_alone(seed: int) -> None:
    rng, parser = random.Random(seed), IncrementalParser()
    history = _messages(rng, 40)
    running: list[tuple[Reading, bytes]] = []
    finished = 0
    for _ in range(400):
        if len(running) < 4 and rng.random() < 0.3:
            kept = history[: rng.choice((len(history), len(history) - 3, 20))]  # continued, taken back, or another branch
            history = [*kept, *_messages(rng, rng.choice((2, 3, 60)))]
            body = _body(history, temperature=rng.random(), tools_first=rng.random() < 0.2)
            running.append((request.read_chat(body, parser, "s"), body))
        elif running:
            reading, body = running[rng.randrange(len(running))]
            try:
                reading.send(None)
            except StopIteration as ended:
                running.remove((reading, body))
                finished += 1
                call, alone = ended.value, read_at_once(body, IncrementalParser(parser.messages))
                assert [bytes(raw) for raw in call.raw_messages] == [bytes(raw) for raw in alone.raw_messages]
                assert {name: json.loads(bytes(raw)) for name, raw in call.fields.items()} == json.loads(body)
                assert call.conversation == alone.conversation
                assert parser.split("s", body) is not None  # so the next one is not parsed as a whole
    for reading, _ in running:
        reading.close()
    assert finished > 20


def test_a_body_that_was_read_while_the_secret_changed_is_not_remembered() -> None:
    parser = IncrementalParser()
    body = _body(_messages(random.Random(2), 200), temperature=0.5, tools_first=False)
    reading = request.read_chat(body, parser, "s")
    reading.send(None)
    parser.secret = b"another"
    at_once(reading)
    other = IncrementalParser()
    other.secret = b"another"
    assert read_at_once(body, parser, "s").conversation == read_at_once(body, other).conversation
