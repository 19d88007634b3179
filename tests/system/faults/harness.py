"""A harness that keeps what it received: an agent of one session that calls any number of replicas.

Each call adds its own *mark*, `#session-7#`, to the history. A prompt then belongs to exactly one call, and shows whose text is in it: so
the checker recognises a false match.

Failed calls are retried unchanged on a random replica, as SDKs and load balancers do. A call that is given up is forgotten, and the agent
continues from where it was.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.system.faults.dialects import Chat, Messages, ReceivedReply, Responses

_OK = 200
HEADER = "X-Tokencache-Session"


class LeftError(Exception):
    """The harness disconnected in the middle of a reply, on purpose."""


@dataclass
class Asked:
    """One call as its harness knows it.

    `marks` are those in its history, its own last. `received` is the reply if it was received whole. `ends` lists how each attempt ended.
    """

    session: str
    marks: tuple[str, ...]
    received: ReceivedReply | None = None
    ends: list[str] = field(default_factory=list)

    @property
    def mark(self) -> str:
        return self.marks[-1]


@dataclass
class Agent:
    """One session's harness; `replicas` are base URLs, of which each attempt uses a random one.

    `tries` is the maximum number of attempts per call, `timeout_s` the timeout of each in seconds. `watch` is called after each event of a
    stream with the number of events so far; it may raise `LeftError` to disconnect. `note` is told how each attempt begins and ends.
    """

    session: str
    dialect: Chat | Messages | Responses
    http: aiohttp.ClientSession
    replicas: Sequence[str]
    streams: bool = True
    tries: int = 1
    timeout_s: float = PATIENCE
    pause: float = 0.05
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    watch: Callable[[int], None] = lambda _: None
    note: Callable[[str, str], None] = lambda *_: None
    asked: list[Asked] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    marks: tuple[str, ...] = ()
    last: ReceivedReply | None = None
    attempts: int = 0
    attempting: bool = False

    async def turn(self, words: str = "Go on, please.") -> ReceivedReply | None:
        """Makes one call: with results if the last reply called tools, else with a user message. `None`: it was given up."""
        asked = Asked(self.session, (*self.marks, f"{self.session}-{len(self.asked)}"))
        self.asked.append(asked)
        text = f"#{asked.mark}# {words}"
        added = self.dialect.results(self.last, text) if self.last is not None and self.last.calls else self.dialect.user(text)
        history = [*self.history, *added]
        for attempt in range(self.tries):
            if attempt:
                await asyncio.sleep(self.pause * self.rng.uniform(0.5, 1.5))
            self.attempts, self.attempting = self.attempts + 1, True
            received = await self._attempt(history, attempt, asked)
            self.attempting = False
            if received is not None:
                asked.received = self.last = received
                self.history, self.marks = [*history, *received.echo], asked.marks
                return received
        return None

    def start_over(self) -> None:
        """Forgets the conversation: the next call begins a new one in the same session, as a sub-agent does."""
        self.history, self.marks, self.last = [], (), None

    def remember(self) -> tuple[Any, ...]:
        """The state of the conversation, for `go_back`."""
        return self.history, self.marks, self.last

    def go_back(self, to: tuple[Any, ...]) -> None:
        """Rolls the conversation back: the next call branches off."""
        self.history, self.marks, self.last = to

    async def _attempt(self, history: list[dict[str, Any]], attempt: int, asked: Asked) -> ReceivedReply | None:
        """Makes one attempt and notes how it ends: returns the reply if it was received whole."""
        replica = self.rng.choice(self.replicas)
        self.note(f"{asked.mark} to {replica}", self.session)
        try:
            received = await self._ask(replica, history, attempt)
        except (aiohttp.ClientError, TimeoutError, LeftError, json.JSONDecodeError) as why:
            received = type(why).__name__
        asked.ends.append(received if isinstance(received, str) else "received")
        self.note(f"{asked.mark} {asked.ends[-1]}", self.session)
        return None if isinstance(received, str) else received

    async def _ask(self, replica: str, history: list[dict[str, Any]], attempt: int) -> ReceivedReply | str:
        """Sends one request: returns the reply, or a word for why it was not received whole."""
        body = self.dialect.body(history, stream=self.streams)
        headers = {HEADER: self.session} | ({"x-stainless-retry-count": str(attempt)} if attempt else {})
        async with asyncio.timeout(self.timeout_s):
            async with self.http.post(replica + self.dialect.path, json=body, headers=headers) as answer:
                if answer.status != _OK:
                    await answer.read()
                    return str(answer.status)
                if answer.content_type != "text/event-stream":
                    return self.dialect.whole(json.loads(await answer.read())) or "half"
                events = []
                async for event in _events(answer):
                    events.append(event)
                    self.watch(len(events))
                return self.dialect.streamed(events) or "half"


async def _events(answer: aiohttp.ClientResponse):
    """The data of each event as it arrives; a broken connection raises the client's error."""
    pending = b""
    async for chunk in answer.content.iter_any():
        *whole, pending = (pending + chunk).split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    yield line[5:].strip().decode()
