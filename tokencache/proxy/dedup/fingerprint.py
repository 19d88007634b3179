"""Imprint: is this call a repetition of one that was made already?

SDKs and harnesses repeat a call after a time-out or a broken connection. What they say of it differs (docs/retries.md has the versions):

=============================  =====================================================================  ============
a call that brings             is                                                                     joins
=============================  =====================================================================  ============
`x-stainless-retry-count` ≥ 1  a repetition: OpenAI's and Anthropic's SDKs say so                     any
`Idempotency-Key`              the same call as another with that key, and another than any without   any
`x-stainless-retry-count: 0`   a first attempt, as far as its SDK knows; a harness may repeat above   one that was left
neither                        a repetition while another one like it is unanswered                   any
=============================  =====================================================================  ============

"Like it" means: the same *imprint*, a hash of everything that the harness sent to be answered. It is looked up within a session only.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import xxhash

from tokencache.store.base import Join

RETRY_COUNT, IDEMPOTENCY_KEY = "x-stainless-retry-count", "Idempotency-Key"

Policy = Literal["join", "marked", "off"]
"""Which calls are taken for repetitions: all that may be, those that say so, none."""


class Repeat(NamedTuple):
    """What a call says of its being a repetition.

    `imprint` are 16 bytes, `b""` where nobody looks; `join` is which call in flight it may join; `marked`: it says itself that it is one.
    """

    imprint: bytes = b""
    join: Join = "never"
    marked: bool = False


def repeat_of(policy: Policy, path: str, headers: Mapping[str, str], body: bytes, harness: str) -> Repeat:
    """Look at a request: its path with the query, its headers (case-insensitive), its body as received, and who asks."""
    if policy == "off":
        return Repeat()
    key, count = headers.get(IDEMPOTENCY_KEY, ""), headers.get(RETRY_COUNT, "")
    head = f"{len(path)} {len(harness)} {len(key)} {path}{harness}{key}"
    imprint = xxhash.xxh3_128(head.encode("utf-8", "surrogateescape"))
    imprint.update(body)
    if key or (count.isdecimal() and int(count[:9]) > 0):
        return Repeat(imprint.digest(), "any", marked=True)
    if policy == "marked":
        return Repeat(imprint.digest())
    return Repeat(imprint.digest(), "orphaned" if count == "0" else "any")


def claim(call: str) -> str:
    """Name the document that says of a call that nobody has heard its reply yet: whoever drops it is the one who may say it."""
    return f"unheard:{call}"


def passed_over(imprint: bytes) -> str:
    """Name the document that names a call whose reply is not to be said again: what is repeated is a later one, which came to nothing."""
    return f"passed-over:{imprint.hex()}"
