"""Reports weight versions and routed experts, as engines for RL do.

Weight versions have one of three forms: `spans`, as vLLM 0.33 reports them on request (`return_weight_versions`, in the last chunk of a
stream or in a whole reply); `metadata`, as SGLang reports one version with each whole reply; `header`, as a router might. Routed experts
have the form of vLLM 0.32 with `--enable-return-routed-experts`: a `.npy` file in base64, only in whole replies, from the token of the
prompt on that the request names (`routed_experts_prompt_start`).
"""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Any, Literal

from tokencache.testing.errors import senseless

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokencache.testing.chat_request import ChatRequest
    from tokencache.testing.weights import SimulatedWeights

VersionStyle = Literal["", "spans", "metadata", "header"]
_START = "routed_experts_prompt_start"


class ReplyMetadata:
    """How an engine reports weight versions and routed experts. Attributes may be changed while it serves.

    Attributes:
        style: form of the weight versions; empty for none.
        experts: number of layers, and of experts chosen in each; `None` for a dense model.
        skips_experts: whether it knows `routed_experts_prompt_start` (older engines ignore it).
    """

    def __init__(self, weights: SimulatedWeights, style: VersionStyle = "", experts: tuple[int, int] | None = None) -> None:
        self._weights = weights
        self.style: VersionStyle = style
        self.experts = experts
        self.skips_experts = True

    @property
    def version(self) -> str:
        """Label of the weights that the engine samples with now, which it reports."""
        return self._weights.label

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a response."""
        return {"X-Weight-Version": self.version} if self.style == "header" else {}

    def of_reply(self) -> dict[str, Any]:
        """Members of a whole reply."""
        return {"metadata": {"weight_version": self.version}} if self.style == "metadata" else {}

    def of_choice(self, request: ChatRequest, versions: Sequence[str]) -> dict[str, Any]:
        """Members of a finished choice. `versions` has one entry for each of its tokens."""
        if self.style != "spans" or not request.body.get("return_weight_versions"):
            return {}
        spans: list[dict[str, Any]] = []
        for at, version in enumerate(versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": at, "end": at})
            spans[-1]["end"] = at + 1
        return {"weight_versions": spans}

    def check(self, request: ChatRequest, prompt: Sequence[int]) -> None:
        """Refuse a request that wants experts from a token on that is not in the prompt.

        Raises:
            RefusalResponse: it does.
        """
        start = request.body.get(_START) or 0
        if self.skips_experts and not 0 <= start <= len(prompt):
            message = f"{_START} must be between 0 and the prompt length ({len(prompt)}), inclusive."
            raise senseless(message, _START, start, by_engine=True)

    def routed(self, request: ChatRequest, prompt: Sequence[int], completion: Sequence[int]) -> str | None:
        """Return the experts of prompt and completion; `None` if nothing was sampled.

        A row depends on its token and on all before it, as in a model. The last token has none: it was sampled but not forwarded.
        """
        if self.experts is None:
            return None
        start = (request.body.get(_START) or 0) if self.skips_experts else 0
        return base64.b64encode(experts_file([*prompt, *completion][:-1], *self.experts, start=start)).decode() if completion else None


def experts_file(ids: Sequence[int], layers: int, chosen: int, *, start: int = 0) -> bytes:
    """Return the experts of tokens as a `.npy` file, from token `start` on."""
    rows, state = bytearray(), 0
    for place, token in enumerate(ids):
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        if place >= start:
            rows += bytes((state * (2 * n + 1) >> 8) % 251 for n in range(layers * chosen))
    shape = (len(ids) - start, layers, chosen)
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (-(10 + len(head) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + rows
