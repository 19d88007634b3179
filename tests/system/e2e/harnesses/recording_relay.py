"""A relay at the outer end of a harness's socket that changes nothing and records all traffic.

It listens on a Unix socket and forwards each request to one upstream (the proxy, or the engine itself), streams included. Every call
becomes one line of JSON in the record:

    {"method", "path", "request_headers": [[name, value], …], "request_body",
     "status", "reason", "response_headers": [[name, value], …], "response_body", "chunks": [size, …], "left": false}

`path` is as written, query included. A body that is UTF-8 is text, any other is `{"base64": "…"}`. `chunks` are the sizes in bytes of the
pieces in which the response arrived; `left` is true if the harness disconnected before its end. Calls are in the order in which they ended.

Only headers of a single connection differ between both sides: `Connection`, `Keep-Alive` and `Transfer-Encoding`.

A WebSocket that the upstream accepts is one call with the status 101. Its bodies are the messages of each side, one a line.
"""

import asyncio
import base64
import contextlib
import json
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection"}
ADDED_BY_CLIENT = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


def read_calls(path):
    """Every call in a record."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


class RecordingRelay:
    """Listens while the context is open: `async with RecordingRelay(upstream, socket, record)`. Removes the prefix `strip` from paths."""

    def __init__(self, upstream, socket, record, *, strip=""):
        self.upstream, self.socket, self.record, self.strip = upstream, Path(socket), Path(record), strip

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.relay)
        self.http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            skip_auto_headers=ADDED_BY_CLIENT,
        )
        limits = {"max_line_size": 64 * 1024, "max_field_size": 64 * 1024}
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, auto_decompress=False, **limits)
        await self.runner.setup()
        await web.UnixSite(self.runner, str(self.socket)).start()
        self.file = self.record.open("a", encoding="utf-8", buffering=1)
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()
        await self.http.close()
        self.file.close()
        self.socket.unlink(missing_ok=True)

    async def relay(self, request):
        body = await request.content.read()
        call = {
            "method": request.method,
            "path": request.raw_path,
            "request_headers": _pairs(request.raw_headers),
            "request_body": _readable(body),
            "status": None,
            "left": True,
        }
        pieces = []
        try:
            if request.headers.get("Upgrade") == "websocket" and (upstream := await self._connect(request)):
                return await self._pass_messages(request, upstream, call, pieces)
            return await self._pass_on(request, body, call, pieces)
        except ConnectionResetError:  # the harness has read all it wants and disconnected: Codex does so at the last event
            raise web.HTTPInternalServerError from None  # the client is gone
        finally:
            call |= {"response_body": _readable(b"".join(pieces)), "chunks": [len(piece) for piece in pieces]}
            self.file.write(json.dumps(call, ensure_ascii=False) + "\n")

    async def _connect(self, request):
        """Open the WebSocket at the upstream; `None` if it refuses."""
        own = {"upgrade", "connection", "host"}
        headers = [
            pair for pair in request.headers.items() if pair[0].lower() not in own and not pair[0].lower().startswith("sec-websocket-")
        ]
        with contextlib.suppress(aiohttp.WSServerHandshakeError):
            return await self.http.ws_connect(self.upstream + request.raw_path.removeprefix(self.strip), headers=headers, max_msg_size=0)

    async def _pass_messages(self, request, upstream, call, pieces):
        shown, sent = web.WebSocketResponse(max_msg_size=0, compress=False), []
        await shown.prepare(request)
        call |= {"status": 101, "reason": "Switching Protocols", "response_headers": []}

        async def pump(source, target, kept):
            async for message in source:
                kept.append(message.data.encode() + b"\n")
                await target.send_str(message.data)
            await target.close()

        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(pump(shown, upstream, sent))
                both.create_task(pump(upstream, shown, pieces))
        finally:
            await upstream.close()
            call |= {"request_body": _readable(b"".join(sent)), "left": False}
        return shown

    async def _pass_on(self, request, body, call, pieces):
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers]
        headers = [(name, value) for name, value in headers if name.lower() not in OF_ONE_CONNECTION]
        if "Upgrade" in request.headers:
            headers += [("Connection", "Upgrade"), ("Upgrade", request.headers["Upgrade"])]
        chunked = "chunked" in request.headers.get("Transfer-Encoding", "")
        async with self.http.request(
            request.method,
            URL(self.upstream + request.raw_path.removeprefix(self.strip), encoded=True),
            headers=headers,
            data=_in_one_chunk(body) if chunked else (body or None),
            allow_redirects=False,
        ) as answer:
            call |= {"status": answer.status, "reason": answer.reason, "response_headers": _pairs(answer.raw_headers)}
            shown = web.StreamResponse(status=answer.status, reason=answer.reason)
            for name, value in answer.headers.items():
                if name.lower() not in OF_ONE_CONNECTION:
                    shown.headers.add(name, value)
            await shown.prepare(request)
            async for piece in answer.content.iter_any():
                pieces.append(piece)
                await shown.write(piece)
            await shown.write_eof()
            call["left"] = False
            return shown


async def _in_one_chunk(body):
    yield body


def _pairs(raw_headers):
    return [[name.decode("latin-1"), value.decode("latin-1")] for name, value in raw_headers]


def _readable(data):
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
