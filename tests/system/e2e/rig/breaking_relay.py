"""A relay in front of an engine that breaks off the first reply of a session after an exact number of tokens.

The name of the session decides: `abort-17` is cut after 17 tokens as `/pause?mode=abort` cuts a reply, `error-17` with an error in the
stream, `lost-17` by a lost connection. The engine gets that number as the limit of the reply, so no token is sampled that the relay omits.
All else is forwarded unchanged, the next request of the same session included.
"""

import json
import re

import aiohttp
from aiohttp import web

CHAT = "/v1/chat/completions"
CUT = re.compile(r"(abort|error|lost)-(\d+)$")
ERROR = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": None, "code": 500}}
OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


class BreakingRelay:
    """Listens while the context is open: `async with BreakingRelay(engine) as relay: relay.url`."""

    def __init__(self, engine):
        self.engine = engine
        self.cut = set()
        """Sessions whose first reply was broken off."""

    async def __aenter__(self):
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self.relay)
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()
        await self.http.close()

    async def relay(self, request):
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OF_ONE_CONNECTION}
        session = request.headers.get("X-Session-ID", "")
        wanted = CUT.search(session) if request.path == CHAT and session not in self.cut else None
        if wanted is not None:
            self.cut.add(session)
            body = json.dumps(json.loads(body) | {"max_tokens": int(wanted[2])}).encode()
        async with self.http.request(request.method, self.engine + request.path_qs, data=body, headers=headers) as answer:
            head = {name: value for name, value in answer.headers.items() if name.lower() not in OF_ONE_CONNECTION}
            response = web.StreamResponse(status=answer.status, headers=head)
            await response.prepare(request)
            if wanted is None:
                async for part in answer.content.iter_any():
                    await response.write(part)
            else:
                assert answer.content_type == "text/event-stream", await answer.text()
                await self.break_off(answer, response, wanted[1], request)
            return response

    @staticmethod
    async def break_off(answer, response, how, request):
        """Forwards a stream whose end is the limit, with another end."""
        events = (await answer.read()).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: {"):
                continue
            chunk = json.loads(event.removeprefix(b"data: "))
            for choice in chunk["choices"]:
                assert choice["finish_reason"] in {None, "length"}, "the reply ended before it was cut"
                if choice["finish_reason"]:  # an engine that dies does not flush its parsers
                    choice.update({"finish_reason": "abort"} if how == "abort" else {"finish_reason": None, "delta": {}})
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if how == "lost":
            request.transport.abort()
            return
        if how == "error":
            await response.write(b"data: " + json.dumps(ERROR).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
