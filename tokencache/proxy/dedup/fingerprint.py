"""Recognizes requests that may repeat an earlier call of their session.

SDKs and harnesses repeat a call after a timeout or a broken connection. They mark such a retry in different ways (docs/retries.md has the
versions):

=============================  =======================================================================  ====================
a request with                 is treated as                                                            joins
=============================  =======================================================================  ====================
`x-stainless-retry-count` ≥ 1  a retry: OpenAI's and Anthropic's SDKs set it                            any call
`Idempotency-Key`              a repetition only of calls with the same key                             any call
`x-stainless-retry-count: 0`   a first attempt for its SDK; the harness around it may still retry       an orphaned call
neither                        a retry, while an equal call is unanswered                               any call
=============================  =======================================================================  ====================

Two calls are equal if they have the same *request fingerprint*: a hash of path, harness, idempotency key and body. It is only looked up
within a session.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec
import xxhash

from tokencache.store.base import Join

RETRY_COUNT, IDEMPOTENCY_KEY = "x-stainless-retry-count", "Idempotency-Key"

Policy = Literal["join", "marked", "off"]
"""Which requests are treated as retries: all that may be retries, only those that are marked as retries, or none."""


class Fingerprint(msgspec.Struct, frozen=True):
    """The properties of a request that show whether it is a retry.

    Attributes:
        digest: the request fingerprint, 16 bytes; `b""` if retries are not deduplicated.
        join: which calls in flight the request may join.
        marked: whether the request is marked as a retry or has an idempotency key.
    """

    digest: bytes = b""
    join: Join = "never"
    marked: bool = False


def fingerprint_of(policy: Policy, path: str, headers: Mapping[str, str], body: bytes, harness: str) -> Fingerprint:
    """Compute the fingerprint of a request.

    Args:
        policy: which requests are treated as retries.
        path: the path with its query.
        headers: the headers, case-insensitive.
        body: the body as received.
        harness: name of the harness, `""` if unknown.
    """
    if policy == "off":
        return Fingerprint()
    key, count = headers.get(IDEMPOTENCY_KEY, ""), headers.get(RETRY_COUNT, "")
    head = f"{len(path)} {len(harness)} {len(key)} {path}{harness}{key}"
    hashed = xxhash.xxh3_128(head.encode("utf-8", "surrogateescape"))
    hashed.update(body)
    if key or (count.isdecimal() and int(count[:9]) > 0):
        return Fingerprint(hashed.digest(), "any", marked=True)
    if policy == "marked":
        return Fingerprint(hashed.digest())
    return Fingerprint(hashed.digest(), "orphaned" if count == "0" else "any")
