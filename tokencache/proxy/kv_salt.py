"""Keeps the prefix cache of an engine apart by policy version, so that no prompt is computed on keys and values of older weights.

vLLM adds a request's `cache_salt` to the hash of each cached block (0.20 to 0.33; chat completions accept it next to exact ids). The salt
is a hash of the deployment's secret, the request's own salt (that of its tenant, or the harness's), the model, the version, and the ordinal
of its announcement. So a version that is set back does not find the blocks of its first time. There are three policies (`--kv`):

`exact`    the version when the request is sent: after an update, each session computes its prompt once again
`session`  the version at the session's first request: a later prompt finds the session's own blocks, which older weights computed in part.
           Such a turn has the mark `hybrid-kv`
`off`      no salt: blocks of older weights are found, unless the trainer empties the cache

If no version is known, no salt is added.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from tokencache.core.chain import keyed_hash
from tokencache.dialects.json_io import FIELDS
from tokencache.recent import Recent
from tokencache.store.base import Store, StoreError

KvPolicy = Literal["exact", "session", "off"]

DOCUMENT = "kv-weights"
"""Name of the session's document with the version by which its prefix cache is kept apart (`session`)."""
MEMBER = "cache_salt"
_MOST_SESSIONS = 65_536


class KvSalt(NamedTuple):
    """The salt of one request.

    Attributes:
        text: the member `cache_salt`, 32 hexadecimal digits; `""` if none is added.
        kv: the policy by which it was made; `""` if no version was known.
        hybrid: whether it names an earlier version than that of the request.
        documents: documents to store with the turn.
    """

    text: str = ""
    kv: KvPolicy | Literal[""] = ""
    hybrid: bool = False
    documents: Mapping[str, bytes] = MappingProxyType({})

    @property
    def keeps_versions_apart(self) -> bool:
        """Whether all keys and values that the request can find are of its own version."""
        return bool(self.text) and not self.hybrid

    def written(self, fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
        """Return the members of a request with the salt."""
        return {**fields, MEMBER: msgspec.Raw(b'"%s"' % self.text.encode())} if self.text else fields

    def written_in(self, body: bytes) -> bytes:
        """Return the body of a request (JSON) with the salt."""
        return msgspec.json.encode(self.written(FIELDS.decode(body))) if self.text else body


NO_SALT = KvSalt()


class SaltedRequest(msgspec.Struct, frozen=True):
    """What a salt depends on besides the version.

    Attributes:
        session, epoch: the session; its epoch is `""` if the store did not answer.
        model: name of the model.
        own: the request's own `cache_salt`, raw: that of its tenant, or the harness's.
    """

    session: str
    epoch: str
    model: str
    own: bytes


class _Basis(msgspec.Struct, frozen=True):
    """The version and the ordinal of its announcement that a salt is made of."""

    version: str
    update: int


class KvSalts:
    """Makes the salts of requests.

    Args:
        policy: the setting `kv`.
        store: has the sessions' documents.
        secret: returns the deployment's secret.
    """

    def __init__(self, policy: KvPolicy, store: Store, secret: Callable[[], bytes]) -> None:
        self._policy, self._store, self._secret = policy, store, secret
        self._first: Recent[tuple[str, str], _Basis] = Recent(_MOST_SESSIONS)

    async def salt(self, request: SaltedRequest, version: str, update: int) -> KvSalt:
        """Make the salt of a request.

        Args:
            request: the request.
            version: the version of the engine's weights; `""` if it is not known.
            update: the ordinal of its announcement; 0 if a trainer did not announce it.
        """
        if self._policy == "off" or not (version or update):
            return KvSalt(kv=self._policy)
        basis = now = _Basis(version, update)
        documents: Mapping[str, bytes] = {}
        if self._policy == "session" and request.epoch:
            basis, documents = await self._of_session(request, now)
        own = b"" if request.own == b"null" else request.own
        hashed = msgspec.msgpack.encode(("kv", own, request.model, basis))
        return KvSalt(keyed_hash(self._secret(), hashed).hex(), self._policy, basis != now, documents)

    async def _of_session(self, request: SaltedRequest, now: _Basis) -> tuple[_Basis, dict[str, bytes]]:
        """Return the basis of the session's first request, and documents to store if this is the first.

        If the store does not answer, the request is salted by its own version.
        """
        key = request.session, request.epoch
        if (known := self._first.get(key)) is not None:
            return known, {}
        try:
            (document,) = await self._store.documents(request.session, [DOCUMENT])
        except StoreError:
            return now, {}
        if document is None:  # until a turn is stored: this call may end without one, or be planned again
            return now, {DOCUMENT: msgspec.json.encode(now)}
        self._first[key] = first = msgspec.json.decode(document, type=_Basis)
        return first, {}
