"""Decides what serves a request, and sends errors in the form that the client's dialect expects.

A model call in a session goes to the proxy's endpoints. All other requests for the engine are relayed to it byte for byte.
"""

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from multidict import CIMultiDict

from tokencache.config import Settings, names_in
from tokencache.core.incidents import IncidentKind
from tokencache.dialects.base import TranslatedDialect
from tokencache.dialects.chat.routes import CHAT, COMPLETIONS, TOKENIZE
from tokencache.dialects.chat.routes import ROUTES as CHAT_ROUTES
from tokencache.dialects.registry import CHAT as CHAT_DIALECT
from tokencache.dialects.registry import credential_headers, dialect_of, use_bearer
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError, TokencacheError
from tokencache.net import end_to_end_headers
from tokencache.proxy.endpoints import Caller, Visit
from tokencache.proxy.harness_profile import HEADER as HARNESS_HEADER
from tokencache.proxy.harness_profile import HarnessProfiles
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.passthrough import relay_to
from tokencache.proxy.request_body import KEPT, body_of
from tokencache.proxy.sessions import Origin, SessionFinder, SessionInBody
from tokencache.server.http_guard import check_head, check_path
from tokencache.session_url import route_of

log = logging.getLogger(__name__)

_INTERNAL_ERROR = 500
_UNRECORDED = "/inference/v1/generate"
"""Samples tokens, but no dialect records it. In a session it leaves a hole, which is recorded as an incident."""
_MODELS = "/v1/models"
_FOR_TENANTS = frozenset({("GET", _MODELS), ("GET", "/health"), ("GET", "/version"), ("POST", "/tokenize"), ("POST", "/detokenize")})
"""Other routes of the engine that a tenant's session may use: they neither sample nor change anything (vLLM 0.32)."""
_DIALECT = web.RequestKey("dialect", TranslatedDialect)


class RequestRouter:
    """Routes the requests that are not for the proxy's own API."""

    def __init__(
        self, settings: Settings, pool: Pool, *, ledger: Ledger, endpoints: Caller, profiles: HarnessProfiles, sessions: SessionFinder
    ) -> None:
        self._pool, self._ledger, self._endpoints, self._profiles, self._sessions = pool, ledger, endpoints, profiles, sessions
        self._sources = sessions.sources
        self._session_header = settings.session_header
        self._session_headers = (settings.session_header, *self._sources.headers)
        own_headers = {*self._session_headers, HARNESS_HEADER, "Content-Length", "Accept-Encoding", "Host", "Expect"}
        self._dropped = frozenset(name.lower() for name in own_headers)
        self._credentials = frozenset(name.lower() for name in credential_headers())
        self._affinity = names_in(settings.affinity_headers)
        self._warns_of_missing_session = settings.return_token_id_information

    async def route(self, request: web.Request) -> web.StreamResponse:
        """Serve a request."""
        path = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs  # `GET http://host/path`
        route = route_of(path)
        dialect = dialect_of(request.method, route, request.headers) if route != CHAT else None  # looking for one costs 10 µs
        if dialect is not None:
            request[_DIALECT] = dialect  # errors from here on have its form
        check_head(request, self._session_headers)
        calls_model = request.method == "POST" and (dialect is not None or route in CHAT_ROUTES)
        in_body = await self._read_session_in_body(request) if calls_model and self._sources.members else None
        origin = await self._sessions.find(path, request.headers, in_body and in_body.session)
        check_path(origin.path)
        if origin.session is None:
            if calls_model:
                self._warn_of_missing_session(request, route)
            return await relay_to(self._pool, None, request, origin.path)
        if in_body is not None:
            request[KEPT] = in_body.rest
        return await self._serve_session(request, origin.session, origin, route, dialect)

    async def _serve_session(
        self, request: web.Request, session: str, origin: Origin, route: str, dialect: TranslatedDialect | None
    ) -> web.StreamResponse:
        """Serve a request of a session: model calls by the endpoints, other routes by relaying them."""
        harness = origin.harness or self._profiles.recognise(request.headers.get("User-Agent", ""))
        headers = self._headers(request, origin, translated=dialect is not None)
        visit = Visit(request, session, origin, route, headers, harness, self._profiles.leniency(harness))
        if dialect is not None:
            return await self._endpoints.answer(visit, dialect)
        if request.method == "POST" and route == CHAT:
            return await self._endpoints.chat(visit)
        if request.method == "POST" and route == COMPLETIONS:
            return await self._endpoints.complete(visit)
        if request.method == "POST" and route == TOKENIZE:
            return await self._endpoints.tokenize(visit)
        if request.method == "POST" and route == _UNRECORDED and not origin.tenant:
            await self._endpoints.admit(visit, "generate")
            incident = IncidentKind.UNRECORDED_ROUTE.incident(f"{route} is relayed, not recorded", at=time.time())
            await self._ledger.add_incidents(session, [incident])
        if origin.tenant and (request.method, route) not in _FOR_TENANTS:
            message = f"{request.method} {route[:80]} is not allowed in a tenant's session: it may make model calls and list the models"
            raise HarnessError(message, status=403, kind="permission_error")
        if (request.method, route) == ("GET", _MODELS):
            return await self._endpoints.models(visit)
        return await relay_to(self._pool, session, request, origin.path, headers=headers)

    async def _read_session_in_body(self, request: web.Request) -> SessionInBody | None:
        """Read a body that may name the session. Returns `None` if it is compressed: only the engine can read it then."""
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return None
        request[KEPT] = body = await body_of(request)
        return self._sources.in_body(body)

    def _warn_of_missing_session(self, request: web.Request, route: str) -> None:
        """Log once that a model call without a session returns no token ids, if replies should have them."""
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

    def _headers(self, request: web.Request, origin: Origin, *, translated: bool) -> CIMultiDict[str]:
        """Make the headers of a session's request for the engine. A `translated` request has those of OpenAI's clients."""
        headers = end_to_end_headers(request.headers, drop=self._dropped | self._credentials if origin.own_key else self._dropped)
        if translated:
            use_bearer(headers)
            headers["Content-Type"] = "application/json"
        for name in self._affinity:  # engines and routers use it to send a session to the cache that knows it
            headers.setdefault(name, origin.session or "")
        return headers


@web.middleware
async def send_errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Send every error in the form of the request's dialect, or in OpenAI's if that is unknown."""
    try:
        return await handler(request)
    except TokencacheError as error:
        response = _error(request, error.status, error.client_message, error.kind, error.param)
        response.headers.update(error.headers)
        return response
    except web.HTTPRequestEntityTooLarge as error:
        return _error(request, 413, f"the request body is too large: {error.text}", "invalid_request_error")
    except (web.HTTPException, ConnectionError):
        raise
    except Exception:
        log.exception("%s %s: internal error", request.method, request.path)
        if request.writer.output_size:
            raise  # a response has begun: aiohttp closes the connection
        return _error(request, 500, "Internal error in tokencache; see its log.", "internal_error")


def _error(request: web.Request, status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    body = request.get(_DIALECT, CHAT_DIALECT).error(status, message, kind, param)
    headers = {"x-should-retry": "false"} if status < _INTERNAL_ERROR else None  # otherwise OpenAI's and Anthropic's SDKs retry a 409
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
