"""Delivery: what the harness hears of a reply, and when.

Of a stream everything is passed on at once up to the event with which the last choice is finished; that one, and what follows it, is
*held* until the turn stands in the store. Before anything was sampled nothing of it is said either: up to there the call can
still be made again. A whole reply of an engine that does not stream is *recited* to a harness that wants a stream, in the
chunks in which it would have come, all at once.

While nothing comes, something is said that says nothing: harnesses and the proxies before them hang up on silence.
"""

import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from tokencache.dialects import gym
from tokencache.dialects.chat.call import ChatCall
from tokencache.dialects.dialect import EVENTS
from tokencache.dialects.sse import DONE, EventSplitter, data_of, event_of
from tokencache.engine.chunks import as_chunks
from tokencache.engine.drivers.base import Driver
from tokencache.engine.reply import Reply
from tokencache.engine.wire import StreamProtocol
from tokencache.proxy.engine_retry import Hold
from tokencache.proxy.exchange import Exchange
from tokencache.proxy.keepalive import SignsOfLife
from tokencache.proxy.overflow import is_overflow
from tokencache.proxy.passthrough import open_response
from tokencache.proxy.recorder import ABORTED, BROKE

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

LEFT = "the harness closed the connection"
_BAD_GATEWAY = 502
_UNSENT = 64 * 1024
"""Bytes that a harness may be behind before the engine has to wait for it; as many as aiohttp allows."""
_DATA = slice(len(b"data: "), -len(b"\n\n"))  # of a plain chunk's event


class Delivery:
    """One reply on its way to its harness.

    Attributes:
        ended: the engine said that it has said everything.
        dropped: the engine aborted the reply before the harness was shown anything of it: it never will be.
        overflowed: the engine refused a prompt within its stream as too long, and the harness is not shown that (`overflow`).
        shown: the harness was shown something of the reply, as it came.
        unheard: the harness has left, and the reply is taken to its end all the same, for whoever asks again.
    """

    def __init__(self, request: web.Request, call: ChatCall, exchange: Exchange, reply: Reply, hold: Hold) -> None:
        self._request, self._call, self._exchange, self._reply, self._hold = request, call, exchange, reply, hold
        self._speaker = exchange.speaker
        self._as_is = exchange.refuse is None
        self.ended = False
        self.dropped = False
        self.overflowed = False
        self.shown = False
        self.unheard = False
        self._over = False  # the reply is: what follows waits for the store
        self._silent = True
        self._unsaid: list[tuple[bytes, bytes, int]] = []
        self._unread = None if exchange.token_ids else self._speaker.unread
        self._way: asyncio.WriteTransport | None = None  # to the harness, once the head and a first event are out

    @property
    def left(self) -> bool:
        """Whether the harness has gone, and with it the call."""
        return not self.unheard and (self._request.transport is None or self._request.transport.is_closing())

    def break_off(self) -> None:
        """Break off as the engine did: a direct client would have seen its connection end in mid-answer."""
        if self._request.transport is not None and not self.unheard:
            self._request.transport.abort()

    def recites(self, driver: Driver) -> bool:
        """Whether a whole reply is to be said as a stream: the harness asked for one, and the engine gives none."""
        return self._call.stream and not driver.streams and self._call.dialect != "completions" and not self.unheard

    def take(self, body: bytes, driver: Driver) -> bytes:
        """Take note of a whole reply.

        Returns:
            What of it the harness may see: without what is too long to look at, unless it asked for just that.
        """
        body = driver.read(self._reply.without_experts(body))
        brief = self._reply.take(body, unseen=not self._call.shows_logprobs)
        self._look_whether_withheld()
        return body if self._call.shows_ids else brief

    def whole(self, body: bytes) -> bytes:
        """Say a whole reply."""
        return self._speaker.body(self._with_tokens(body))

    def recited(self, body: bytes, prompt_tokens: int = 0) -> bytes:
        """Say a whole reply as a stream; what is none as an error in one. `prompt_tokens`: of a reply that no engine gave just now."""
        counted = prompt_tokens or self._counted
        try:
            chunks = as_chunks(body, self._call.fields)
        except ValueError as why:
            return self._speaker.failed(_BAD_GATEWAY, str(why))
        told = [self._with_tokens(chunk) for chunk in chunks]
        return b"".join([*[self._speaker.chunk(event_of(chunk), chunk, counted) for chunk in told], self._speaker.end()])

    async def say(self, body: bytes, prompt_tokens: int = 0) -> web.StreamResponse:
        """Say a whole reply of our own, in the form that was asked for; `prompt_tokens` as for `recited`."""
        if self._call.stream:
            return await self.finish(await self._hold.open(), self.recited(body, prompt_tokens))
        return web.Response(body=self.whole(body), content_type="application/json")

    async def follow(self, answer: aiohttp.ClientResponse) -> tuple[bytes, tuple[str, str] | None]:
        """Pass a stream on as it comes.

        Returns:
            What is to wait for the store; and how the stream was cut off and why, `None` if it was not.
        """
        response = self._hold.opened or await self._opened(answer)
        async with SignsOfLife(self._exchange.keep_alive, lambda: self._break_silence(response)):
            return await self._pass_on(answer, response)

    async def finish(self, response: web.StreamResponse, held: bytes, *, cut: bool = False) -> web.StreamResponse:
        """Say what waited, and end the stream, or break it off."""
        with contextlib.suppress(ConnectionError):  # the harness may leave even now; its turn is recorded
            if cut:
                await response.write(held)
            else:
                await response.write_eof(held)  # in one write, which wakes the harness once
        if cut:
            self.break_off()
        return response

    async def _opened(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = open_response(answer, drop=frozenset({"content-length"}))
        if self._exchange.media_type != EVENTS:
            response.headers["Content-Type"] = self._exchange.media_type
        with contextlib.suppress(ConnectionError):  # the harness may have left: that is found out when something is written
            await response.prepare(self._request)
        self._hold.opened = response
        return response

    async def _pass_on(self, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> tuple[bytes, tuple[str, str] | None]:
        splitter, held = EventSplitter(), bytearray()
        try:
            writer = await response.prepare(self._request)  # it is: this gives what `response.write` looks for at each chunk
            assert writer is not None  # noqa: S101 - only an answer that has ended has none
            chunked = response.headers.get("Transfer-Encoding") == "chunked"
            with StreamProtocol(answer, self._settle) as wire:
                while came := await wire.next():
                    told = self._told(splitter.feed(came), held)
                    if told and not self.unheard:
                        self._silent = False
                        await writer.write(told)
                        self._way = self._request.transport if chunked else None
        except (aiohttp.ClientError, ConnectionResetError, TimeoutError) as why:
            # On which side? aiohttp's errors of a write and of a read look alike.
            broke = (ABORTED, LEFT) if self.left else (BROKE, f"{type(why).__name__}: {why}")
        except Exception as why:  # a codec of ours cannot say it: what was sampled is recorded all the same
            log.exception("the reply cannot be said")
            broke = ("internal-error", f"{type(why).__name__}: {why}")
        else:
            return self._lead() + bytes(held) + (splitter.rest if self._as_is else b""), None
        return self._lead() + bytes(held), broke

    def _settle(self, event: bytes) -> bool:
        """Pass an event on that need not be read now; false if it must be, or has to wait for a slow harness."""
        if self._way is None or self._way.is_closing() or self._way.get_write_buffer_size() > _UNSENT:
            return False
        told = self._plain(event)
        if told and not self.unheard:
            self._silent = False
            self._way.write(b"%x\r\n%b\r\n" % (len(told), told))  # what `response.write` would
        return told is not None

    def _told(self, events: Iterable[bytes], held: bytearray) -> bytes:
        """What the harness is to see of some events now; what it must wait for is added to `held`."""
        shown = bytearray()
        for event in events:
            told = self._plain(event)
            kept = self._event(event) if told is None else told
            (held if self._over else shown).extend(kept)
        return bytes(shown)

    def _plain(self, event: bytes) -> bytes | None:
        """What the harness is to see of an event that need not be read now; `None` if it must be."""
        if self._unread is None or self._over or not self.shown:
            return None
        told = self._unread(event)
        if told is not None:
            self._reply.later(event[_DATA])
        return told

    def _event(self, event: bytes) -> bytes:
        """Take note of one event; what the harness is to see of it."""
        data = data_of(event)
        if self.dropped or self.overflowed:
            return b""
        if data is None:
            return event if self._as_is else b""  # a comment of the engine's is for who speaks to it
        if data == DONE:
            self._over = self.ended = True
            return self._lead() + self._speaker.end()
        data = self._reply.without_experts(data)
        brief = self._reply.take(data)
        self._over = self._over or self._reply.finished or bool(self._reply.error)
        shown = data if self._call.shows_ids else brief
        told = self._with_tokens(shown)
        if self.shown:
            return self._speaker.chunk(event if told is shown else event_of(told), told, self._counted)
        self._unsaid.append((event if told is shown else event_of(told), told, self._counted))
        if not (self._reply.begun or self._reply.error):
            return b""  # until something was sampled the call can still be made again
        self._look_whether_withheld()
        return self._lead()

    @property
    def _counted(self) -> int:
        """How many tokens the prompt has, for a codec to say; counting them costs."""
        return 0 if self._as_is else self._reply.prompt.tokens

    def _lead(self) -> bytes:
        """Say what has not been said yet; of what the harness is never to be shown, nothing."""
        if self.dropped or self.overflowed:
            return b""
        self.shown = True
        unsaid, self._unsaid = self._unsaid, []
        return b"".join([self._speaker.chunk(*chunk) for chunk in unsaid])

    def _look_whether_withheld(self) -> None:
        self.dropped = not self.shown and self._reply.aborted and self._hold.may_repeat
        self.overflowed = not self.shown and self._exchange.token_ids and is_overflow(self._reply.refusal, self._reply.error)

    def _with_tokens(self, data: bytes) -> bytes:
        """What the harness is to see, with the ids on its messages if it is to have them there."""
        return gym.with_tokens(data, self._reply.prompt.raw, self._reply.choices) if self._exchange.token_ids else data

    async def _break_silence(self, response: web.StreamResponse) -> None:
        if self._silent:
            await response.write(self._speaker.keep_alive())
        self._silent = True
