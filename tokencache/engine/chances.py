"""The log probabilities of a whole reply, read apart from it.

They are most of the bytes of such a reply, and hardly a harness asks to see them. So they are cut out and read once, as vLLM (0.27 to
0.32) writes them; what is left is short, and costs little to read for the record, and again for what the harness is shown.
"""

from typing import Literal

import msgspec

CUT: Literal["="] = "="
"""Stands where the log probabilities stood, as a JSON string."""
_NAME = b'"logprobs":'
_BEGIN = _NAME + b'{"content":['
_END = b'"top_logprobs":[]}]}'
"""No string in JSON can spell either: its quotes would be escaped."""


class Chance(msgspec.Struct, gc=False):
    """What is kept of one sampled token: the natural logarithm of its probability."""

    logprob: float


class Logprobs(msgspec.Struct):
    """Of a chat (`content`) or of a text completion (`token_logprobs`)."""

    content: list[Chance] | None = None
    token_logprobs: list[float | None] | None = None


_LOGPROBS = msgspec.json.Decoder(Logprobs)


def cut(data: bytes) -> tuple[bytes, Logprobs | None]:
    """Take log probabilities out of the JSON of a reply of one choice, where it can be told where they end.

    What begins as an object and can be read as one, to its last byte, is the whole value that began there: so only the place is left
    to be checked, by who reads the rest and finds `CUT` in it.

    Returns:
        The JSON with `CUT` in their place, and what they are; the very bytes and `None` where they are written in any other way.
    """
    start = data.find(_BEGIN) + len(_NAME)
    end = data.rfind(_END) + len(_END)
    if start < len(_NAME) or end < start:
        return data, None
    try:
        told = _LOGPROBS.decode(memoryview(data)[start:end])
    except (ValueError, RecursionError):
        return data, None
    return b'%s"%s"%s' % (data[:start], CUT.encode(), data[end:]), told
