"""Weight versions: with which weights a completion was sampled, as far as the engine says it.

An engine whose weights are updated while it serves may sample one reply with several versions. What is said of it, the first
that is there counts:

1. spans of a choice, `choices[].weight_versions: [{"version", "start", "end"}]` over its tokens: vLLM 0.33 and later, asked for
   with `return_weight_versions` (vLLM, `docs/training/weight_transfer/`; 0.32 ignores the question);
2. spans or one version of the reply, `metadata.weight_versions` and `metadata.weight_version`: SGLang, whole replies only, of the
   first choice (`sglang/srt/utils/weight_versions.py`); `sglext` instead of `metadata` where a release has it there (sglang PR 40347);
3. the header `X-Weight-Version` of the answer: no engine that we know of sends it; it is for a worker or a router of your own that
   knows the version (NeMo RL's worker keeps it to itself).

One version of a whole reply is written as one span. It hides a change in mid-reply, which only spans can tell.
"""

from typing import Any

import msgspec

HEADER = "X-Weight-Version"


class Metadata(msgspec.Struct):
    """What SGLang says of a reply's weights."""

    weight_version: Any = None
    weight_versions: Any = None


def spans(own: list[Any], said: Metadata | None, header: str, tokens: int) -> list[Any]:
    """The spans of a completion.

    Args:
        own: spans that came with its choice.
        said: what was said of the reply that it is the first choice of; `None` for any other choice.
        header: the version in the answer's header, `""` if there is none.
        tokens: how long the completion is.

    Returns:
        `{"version", "start", "end"}`, half-open over the completion's tokens; none where nothing was said.
    """
    if own:
        return own
    if said is not None and isinstance(said.weight_versions, list) and said.weight_versions:
        return said.weight_versions
    version = said.weight_version if said is not None and said.weight_version is not None else header
    return [{"version": version, "start": 0, "end": tokens}] if version != "" and tokens else []
