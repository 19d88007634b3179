"""Reports weight versions and routed experts, as engines for RL do.

Weight versions have one of three forms: `spans`, as vLLM 0.33 reports them on request (`return_weight_versions`, in the last chunk of a
stream or in a whole reply); `metadata`, as SGLang reports one version with each whole reply; `header`, as a router might. Routed experts
have the form of vLLM 0.32 with `--enable-return-routed-experts`: a `.npy` file in base64, only in whole replies.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokencache.testing.chat_request import ChatRequest

VersionStyle = Literal["", "spans", "metadata", "header"]
PauseMode = Literal["", "abort", "keep", "wait"]


class ReplyMetadata:
    """How an engine reports weight versions and routed experts. Attributes may be changed while it serves.

    Attributes:
        style: form of the weight versions; empty for none.
        version: label of the weights that it samples with now, which it reports; `default` until one is set.
        experts: number of layers, and of experts chosen in each; `None` for a dense model.
    """

    def __init__(self, style: VersionStyle = "", experts: tuple[int, int] | None = None) -> None:
        self.style: VersionStyle = style
        self.version = "default"
        self.experts = experts

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

    def routed(self, tokens: int) -> str | None:
        """Experts for a prompt and completion of this many tokens. The last token has none: it was sampled but not forwarded."""
        if self.experts is None:
            return None
        layers, chosen = self.experts
        shape = (tokens - 1, layers, chosen)
        head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
        head += b" " * (-(10 + len(head) + 1) % 64) + b"\n"
        rows = bytes(n % 251 for n in range(shape[0] * layers * chosen))
        return base64.b64encode(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + rows).decode()
