"""Prompts by hash in the simulated engine: the part of the plugin `tokencache_vllm` that keeps the ids of conversations.

The engine keeps each prompt that a request named, with its complete replies. `kept` is what another request can name, and may be changed
while the engine serves. `tokencache_vllm.prefixes` describes requests and answers.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from array import array
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from tokencache.testing.errors import senseless

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROMPT_HEADER, MISS_HEADER = "x-tokencache-prompt", "x-tokencache-prefix"
_MEMBER = "tokencache_prefix"


class PrefixFault(Enum):
    """What goes wrong with prompts by hash. The engine answers 200 all the same, except with `REFUSED`."""

    OTHER_IDS = "other ids"
    """What is kept under a hash has another last id. The header has the hash of the ids that are used."""
    FALSE_HASH = "false hash"
    """As `OTHER_IDS`, and the header has the hash that the client expects."""
    NOT_THERE = "not there"
    """The plugin is not there any more: the member is ignored, and the messages are rendered."""
    REFUSED = "refused"
    """The plugin refuses every such request."""


class NamedIds(NamedTuple):
    """What a request says of its prompt: the ids (`None` if the engine renders), the hash that the client expects, and options."""

    ids: list[int] | None
    expected: str = ""
    echo: bool = True
    packed: bool = False
    experts: bool = False


def sha256(ids: Sequence[int]) -> str:
    """Return the SHA-256 of packed ids, as hex digits."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


class SimulatedPrefixes:
    """The prompts that one engine keeps. Attributes may be changed while it serves.

    Attributes:
        offered: whether the engine has the plugin.
        kept: hash → ids; clear it to make the engine forget.
        fault: what goes wrong with every prompt by hash; `None` for nothing.
        hits, misses: number of prefixes that were asked for and found, and not found.
    """

    def __init__(self, *, offered: bool) -> None:
        self.offered = offered
        self.kept: dict[str, list[int]] = {}
        self.fault: PrefixFault | None = None
        self.hits = self.misses = 0

    def read(self, body: Mapping[str, Any]) -> NamedIds | None:
        """Return the prompt that a request names; `None` if it names none, or without the plugin.

        Raises:
            RefusalResponse: the prefix is not there.
        """
        given = (body.get("kv_transfer_params") or {}).get(_MEMBER)
        if given is None or not self.offered or self.fault is PrefixFault.NOT_THERE:
            return None
        name = f"kv_transfer_params.{_MEMBER}"
        if self.fault is PrefixFault.REFUSED:
            raise senseless(f"`{name}`: refused.", name)
        packed, experts = given.get("packed", False), given.get("experts", False)
        if "tail" not in given:
            return NamedIds(None, packed=packed, experts=experts)
        tail = _ids(given["tail"])
        prefix: list[int] = []
        if given.get("length"):
            found = self.kept.get(given["hash"])
            if found is None:
                self.misses += 1
                refusal = senseless(f"`{name}`: this API server does not have the prefix; send the whole prompt as `tail`.", name)
                refusal.headers = {MISS_HEADER: "miss"}
                raise refusal
            self.hits += 1
            prefix = found
        ids = [*prefix, *tail]
        expected = sha256(ids)
        if prefix and self.fault in {PrefixFault.OTHER_IDS, PrefixFault.FALSE_HASH}:
            ids[len(prefix) - 1] ^= 1
        return NamedIds(ids, expected, given.get("echo", False), packed, experts)

    def headers(self, named: NamedIds, used: Sequence[int]) -> dict[str, str]:
        """Return the header with the hash of the prompt."""
        return {PROMPT_HEADER: named.expected if self.fault is PrefixFault.FALSE_HASH and named.expected else sha256(used)}

    def keep(self, ids: Sequence[int]) -> None:
        """Keep a prompt with its reply."""
        self.kept[sha256(ids)] = list(ids)


def _ids(tail: str) -> list[int]:
    raw = base64.b64decode(tail)
    return list(struct.unpack(f"<{len(raw) // 4}i", raw))


def pack_prompt(ids: Sequence[int]) -> dict[str, Any]:
    """Return the member of an answer with the packed ids of its prompt, as the plugin writes it."""
    return {"tokencache": {"prompt": base64.b64encode(struct.pack(f"<{len(ids)}i", *ids)).decode()}}


def pack_tokens(choice: dict[str, Any]) -> None:
    """Pack the ids and log probabilities of a choice, or of a part of it, as the plugin does."""
    tokens = choice["token_ids"]
    if tokens is None:
        return
    values = [one["logprob"] for one in choice["logprobs"]["content"]] if choice["logprobs"] is not None else []
    ids = struct.pack(f"<{len(tokens)}i", *tokens)
    single = array("f", values).tolist() == values
    kind = "f" if single else "d"
    logprobs = kind.encode() + struct.pack(f"<{len(values)}{kind}", *values) if values else b""
    members = {"ids": base64.b64encode(ids).decode(), "logprobs": base64.b64encode(logprobs).decode()}
    choice |= {"token_ids": None, "logprobs": None, "tokencache": members}
