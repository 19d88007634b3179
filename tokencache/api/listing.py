"""Lists sessions with filters, a page at a time.

A cursor names the store that made it, by a hash of the store's secret, so a cursor of another store is refused. A page may have fewer
sessions than its limit, because filters apply after the store has read some; the last page has no cursor.
"""

import base64
import hashlib
from collections.abc import Callable

from aiohttp import web

from tokencache.api.http import choice, number, seconds
from tokencache.api.summaries import check_outcome
from tokencache.core.session import SessionStage
from tokencache.proxy.ledger import Ledger
from tokencache.store.base import CursorError, SessionInfo, Store
from tokencache.trajectories.rollout import worth_object

MAX_LIMIT = 1000
_ANY = "any"
STAGES = (_ANY, *SessionStage)
_MOST_READ = 20
"""Times its limit that a page may read of the store."""
_MOST_PAGES = 50
"""Pages of the store that a page may read."""
_TAG_BYTES = 6


async def store_tag(store: Store) -> bytes:
    """Return six bytes that name a store, derived from its secret. The secret cannot be derived from them."""
    return hashlib.blake2b(await store.secret(), digest_size=_TAG_BYTES, person=b"store-tag").digest()


def filters_of(request: web.Request, ledger: Ledger) -> Callable[[SessionInfo], bool]:
    """Read the filters of a request. The ledger knows the incidents that are not saved yet.

    Raises:
        HarnessError: a filter is invalid.
    """
    query = request.query
    state = choice(request, "state", STAGES, _ANY)
    since, until = seconds(request, "since"), seconds(request, "until")
    group, tag, harness, prefix = query.get("group"), query.get("tag"), query.get("harness"), query.get("prefix", "")
    outcome = query.get("outcome", "")
    check_outcome(outcome)

    def matches(info: SessionInfo) -> bool:
        return (
            info.id.startswith(prefix)
            and state in {_ANY, info.state}
            and (group is None or info.labels.group == group)
            and (tag is None or tag in info.labels.tags)
            and (harness is None or info.harness == harness)
            and (since is None or info.used >= since)
            and (until is None or info.used <= until)
            and (not outcome or worth_object(info, ledger.unsaved(info.id))["outcome"] == outcome)
        )

    return matches


async def listed(request: web.Request, ledger: Ledger) -> tuple[list[SessionInfo], str | None]:
    """Return the sessions that a request asks for, and the cursor of the next page; `None` if there is none.

    Raises:
        HarnessError: a parameter is invalid.
        CursorError: the cursor is damaged, or another store's.
    """
    store, matches = ledger.store, filters_of(request, ledger)
    given = request.query.get("cursor", "")
    limit = number(request, "limit", 0, most=MAX_LIMIT)
    if not limit and not given:
        return [info async for info in store.sessions() if matches(info)], None
    limit = limit or MAX_LIMIT
    tag = await store_tag(store)
    cursor = _unpack(given, tag) if given else b""
    found: list[SessionInfo] = []
    read = 0
    for _ in range(_MOST_PAGES):
        page = await store.page(cursor, limit - len(found))
        read += len(page.sessions)
        found += filter(matches, page.sessions)
        cursor = page.cursor
        # The rest of a nearly full page would be read in small pieces.
        if not cursor or len(found) > limit * 3 // 4 or read >= limit * _MOST_READ:
            break
    return found, _pack(cursor, tag) if cursor else None


def _pack(cursor: bytes, tag: bytes) -> str:
    return base64.urlsafe_b64encode(tag + cursor).decode().rstrip("=")


def _unpack(given: str, tag: bytes) -> bytes:
    """Read a cursor. Raises `CursorError` if it is damaged, or another store's."""
    try:
        packed = base64.b64decode(given + "=" * (-len(given) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise CursorError("it is damaged") from None
    if packed[:_TAG_BYTES] != tag or len(packed) == _TAG_BYTES:
        raise CursorError("it is of another store")
    return packed[_TAG_BYTES:]
