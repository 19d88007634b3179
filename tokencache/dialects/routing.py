"""Routed experts: taken out of a reply before anybody reads it.

A mixture-of-experts engine that was started with `--enable-return-routed-experts` says with every whole reply which experts each
token was routed to: `choices[].routed_experts`, a `.npy` file in base64 (vLLM 0.32, `chat_completion/protocol.py`; text
completions repeated_choice; streamed replies have none). That is 384 bytes a token for Qwen3-30B-A3B, and 100 MiB a turn for the largest.
So it is cut out of the bytes of the body, which costs two searches, and never goes through a JSON reader.
"""

import binascii

_NAME = b'"routed_experts":'
_BEGIN = b'"routed_experts":"'
"""No string in JSON can spell either: its quotes would be escaped."""
_MARK = b"=%d"
_PIECE = 2**20
"""Characters that are decoded at once; a multiple of 4."""
_NPY = b"\x93NUMPY"


def cut(data: bytes, pieces: list[bytes]) -> bytes:
    """Take every text of routed experts out of a reply's JSON, and add it to `pieces`.

    Returns:
        The JSON; `"=0"`, a string that is no base64, stands where the first piece stood.
    """
    at = data.find(_BEGIN)
    if at < 0:
        return data
    kept, end = [], 0
    while at >= 0:
        start = at + len(_BEGIN)
        kept += [data[end:start], _MARK % len(pieces)]
        end = data.find(b'"', start)
        if end < 0:
            return data  # half a body: not ours to repair
        pieces.append(data[start:end])
        at = data.find(_BEGIN, end)
    return b"".join([*kept, data[end:]])


def named(data: bytes, start: int, end: int) -> bool:
    """Whether a part of a reply's JSON has a text of routed experts."""
    return data.find(_BEGIN, start, end) >= 0


def piece_of(value: bytes, pieces: list[bytes]) -> bytes:
    """The routed experts that a choice's raw member stands for: base64, or what else it says as JSON; `b""` if nothing."""
    if value == b"null":
        return b""
    mark = value[2:-1]
    return pieces[int(mark)] if value[:2] == b'"=' and mark.isdigit() and int(mark) < len(pieces) else value


def there(data: bytes) -> bool:
    """Whether a reply's JSON has routed experts, or what stands for them."""
    return data.count(_NAME) > data.count(_NAME + b"null")


def unpacked(piece: bytes) -> tuple[bytearray, str]:
    """Decode routed experts into the bytes of a file, and say its suffix: `.npy`, or `.json` for what is no such file in base64."""
    file = bytearray()
    try:
        for at in range(0, len(piece), _PIECE):  # in pieces, so that the event loop gets its turn
            file += binascii.a2b_base64(piece[at : at + _PIECE], strict_mode=True)
    except binascii.Error:
        file.clear()
    if file.startswith(_NPY):
        return file, ".npy"
    return bytearray(piece if piece[:1] in {b"[", b"{"} else b'"%s"' % piece), ".json"
