"""Routes each request to the part of the proxy that serves it, and sends errors in the form of the client's dialect.

A model call in a session goes to the proxy's endpoints. All other requests for the engine are relayed to it byte for byte.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from aiohttp import web

from tokencache.config import Settings
from tokencache.dialects.base import Dialect
from tokencache.dialects.chat.routes import CHAT, TOKENIZE
from tokencache.dialects.chat.routes import ROUTES as CHAT_ROUTES
from tokencache.dialects.registry import CHAT as CHAT_DIALECT
from tokencache.dialects.registry import dialect_of
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError, MemoryFullError, TokencacheError
from tokencache.proxy.call import log_end
from tokencache.proxy.compressed_body import coding_of
from tokencache.proxy.endpoints import Endpoints
from tokencache.proxy.passthrough import relay_to
from tokencache.proxy.request_body import DECOMPRESSED, plain, waits_to_send, whole_body_of
from tokencache.proxy.response import REQUEST_ID
from tokencache.proxy.sessions import Origin, SessionFinder
from tokencache.request_memory import holding_of
from tokencache.server.http_guard import check_head, check_path
from tokencache.server.responses_socket import ResponsesSockets, is_handshake
from tokencache.session_url import NamedPath, spellings

log = logging.getLogger(__name__)

_DIALECT = web.RequestKey("dialect", Dialect)


class RequestRouter:
    """Routes requests that are not for the proxy's own API.

    Attributes:
        sockets: the WebSockets of the Responses dialect. Their messages are routed here, too.
    """

    def __init__(self, settings: Settings, pool: Pool, endpoints: Endpoints, sessions: SessionFinder) -> None:
        self._pool, self._endpoints, self._sessions = pool, endpoints, sessions
        self._sources = sessions.sources
        self._session_header = settings.session_header
        self._session_headers = (settings.session_header, *self._sources.headers)
        self.sockets = ResponsesSockets(self.route, send_errors, endpoints.note_refusal)
        self._warns_of_missing_session = settings.return_token_id_information

    async def route(self, request: web.Request) -> web.StreamResponse:
        """Serve a request."""
        path = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs  # `GET http://host/path`
        named = NamedPath.read(path)
        route, dialect = _find_route(request.method, named.route, request.headers)
        if dialect is not None:
            request[_DIALECT] = dialect  # from here on, errors have its form
        session = None
        try:
            check_head(request, self._session_headers)
            calls_model = request.method == "POST" and (dialect is not None or route == TOKENIZE)
            origin = await self._sessions.find(named, request.headers)
            session = origin.session
            if calls_model and self._sources.members:
                origin = await self._read_session_in_body(request, named, origin)
                session = origin.session
            del named  # what this frame names, it keeps for as long as a stream
            check_path(origin.path)
            if session is None:
                if calls_model:
                    self._warn_of_missing_session(request, route)
                return await relay_to(self._pool, None, request, origin.path)
            if "Upgrade" in request.headers and is_handshake(request, route):
                return await self.sockets.serve(request, session)
            return await self._endpoints.serve(request, session, origin, route, dialect)
        except TokencacheError as why:
            if dialect is not None and request.method == "POST" and not why.reported:
                _log_refusal(request, session, route, why)
                if session is not None and isinstance(why, HarnessError | MemoryFullError):
                    await self._endpoints.note_refusal(request, session, why)
            raise

    async def _read_session_in_body(self, request: web.Request, named: NamedPath, origin: Origin) -> Origin:
        """Read a body that may name the session, and remove its name. One in an unknown coding names none.

        Returns the origin with the session, which is that of the body if nothing else names one. Without a session the body stays as it is.
        """
        holding = holding_of(request)
        try:
            coding = coding_of(request)
        except HarnessError:
            return origin
        body = await plain(await whole_body_of(request), coding, request, holding)
        found = self._sources.in_body(body)
        if origin.session is None and found.session is not None:
            origin = await self._sessions.find(named, request.headers, found.session)
        if origin.session is not None:
            holding.body, request[DECOMPRESSED] = found.rest, True
        return origin

    def _warn_of_missing_session(self, request: web.Request, route: str) -> None:
        """If replies should have token ids, log once that a model call without a session returns none."""
        if not self._warns_of_missing_session:
            return
        self._warns_of_missing_session = False
        log.warning(
            "%s %s: the request names no session, so it is relayed to the engine and not recorded, and its reply carries no token ids, "
            "although --return-token-id-information is on. Name the rollout's session in the base URL (http://HOST:PORT/s/SESSION), "
            "in the header %s or with --session-from. NeMo Gym's agents name it once observability_enabled or token_id_capture.enabled "
            "is set (docs/topologies/nemo-gym.md). Further requests of this kind are not logged",
            request.method,
            route,
            self._session_header,
        )


def _log_refusal(request: web.Request, session: str | None, route: str, why: TokencacheError) -> None:
    """Log a request for a reply that was refused before its call began, in one line, as a call has one."""
    subject = f"{f'session {session}' if session else 'no session'} POST {route[:80]}"
    known = {"session": session or "", "route": route[:80]}
    log_end(subject, known, request.headers, why.kind, status=why.status, level=logging.INFO)
    log.debug("%s: %s: %s", subject, why.kind, why)


def _find_route(method: str, route: str, headers: Mapping[str, str]) -> tuple[str, Dialect | None]:
    """Return the route in the spelling in which it is served here, and its dialect; percent-decoded if it is not served here."""
    if route == CHAT and method == "POST":  # looking for a dialect costs 10 µs
        return route, CHAT_DIALECT
    for spelling in spellings(route):
        dialect = dialect_of(method, spelling, headers)
        if dialect is not None or spelling in CHAT_ROUTES:
            return spelling, dialect
    return spelling, None


async def send_errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Send every error in the form of the request's dialect, or in OpenAI's if that is unknown."""
    try:
        return await handler(request)
    except TokencacheError as error:
        response = _error(request, error.status, error.client_message, error.kind, error.param)
        response.headers.update(error.headers)
        return response
    except (web.HTTPException, ConnectionError):
        raise
    except Exception:
        log.exception("%s %s: internal error", request.method, request.path)
        if request.writer.output_size:
            raise  # a response has begun: aiohttp closes the connection
        return _error(request, HTTPStatus.INTERNAL_SERVER_ERROR, "Internal error in tokencache; see its log.", "internal_error")


def _error(request: web.Request, status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    body = request.get(_DIALECT, CHAT_DIALECT).error(status, message, kind, param)
    headers = {}
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        headers["x-should-retry"] = "false"  # otherwise OpenAI's and Anthropic's SDKs retry a 409
    if _DIALECT in request and (own := request.headers.get(REQUEST_ID)):
        headers[REQUEST_ID] = own
    response = web.Response(body=body, status=status, headers=headers, content_type="application/json")
    if waits_to_send(request):
        response.force_close()
    return response
