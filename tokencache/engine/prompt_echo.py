"""The prompt's ids as they come back: an engine says with every reply which it used.

That is hundreds of kilobytes of digits. They are held against those that were sent, byte for byte and once; where they are the same,
nobody copies or parses them. Where none were sent, they are read once and by themselves. Either way they are cut out of the reply, and
whoever reads it after that has a short one.
"""

import msgspec

from tokencache.core import ids

Raw = msgspec.Raw

_IDS = msgspec.json.Decoder(list[int])
_ECHO = b'"prompt_token_ids":['
"""No string in JSON can spell this: its quotes would be escaped."""
CUT = b'"="'
"""Stands where the echo stood."""
_ODD = b" \t\r\n-"
"""What a JSON list of integers may hold beside brackets, digits and commas."""
_NOTHING = b"", 0, 0


class EchoedPrompt:
    """What an engine says of the ids of its prompt.

    Attributes:
        sent: the ids that were sent, as a JSON fragment in pieces (`core.ids`); empty if none were.
        agreed: whether the engine says that it used just these.
    """

    def __init__(self) -> None:
        self.sent: ids.Pieces = ()
        self.agreed = False
        self._raw = b""
        self._packed: bytes | None = None
        self._tokens = 0
        self._apart: tuple[bytes, bytes | None] = b"", None  # raw and packed: what was read by itself
        self._whole = False  # nothing is cut out any more
        self._found = _NOTHING  # what was looked at last, and where in it the echo stands

    @property
    def known(self) -> bool:
        """Whether the engine has said it."""
        return self.agreed or bool(self._raw)

    @property
    def raw(self) -> bytes:
        """The raw JSON list of the ids that it says it used; `b""` while unknown."""
        if self.agreed and not self._raw:
            self._raw = b"[%s]" % b"".join(self.sent)
        return self._raw

    @property
    def tokens(self) -> int:
        """How many tokens the prompt has; 0 while unknown."""
        if not self._tokens and self.known:
            said = self.sent if self.agreed else (self._raw,)
            self._tokens = sum(piece.count(b",") for piece in said) + 1
        return self._tokens

    @property
    def packed(self) -> bytes | None:
        """The ids that it says it used, packed; `None` while unknown, and of what are no ids."""
        if self._packed is None:
            self._packed = read_ids(self.raw)
        return self._packed

    def find(self, data: bytes) -> tuple[int, int]:
        """Where in a reply's JSON the ids stand that are to be cut out, without their brackets; (0, 0) if nowhere, or if they are known.

        Those that were sent, if any were, and no others.
        """
        if self._whole or self.known:
            return 0, 0
        if self._found[0] is not data:
            self._found = data, *(self._compared(data) if self.sent else self._listed(data))
        return self._found[1:]

    def _compared(self, data: bytes) -> tuple[int, int]:
        start = end = data.find(_ECHO) + len(_ECHO)
        if start < len(_ECHO):
            return 0, 0
        for piece in self.sent:
            if not data.startswith(piece, end):
                return 0, 0
            end += len(piece)
        return (start, end) if data[end : end + 1] == b"]" else (0, 0)

    def _listed(self, data: bytes) -> tuple[int, int]:
        start = data.find(_ECHO) + len(_ECHO)
        end = data.find(b"]", start)
        if start < len(_ECHO) or end < 0:
            return 0, 0
        raw = data[start - 1 : end + 1]
        packed = read_ids(raw)  # what can be read as a list, to its last byte, is the whole one that began here
        if packed is None:
            return 0, 0
        self._apart = raw, packed
        return start, end

    def cut(self, data: bytes) -> bytes:
        """A reply's JSON with `CUT` in the place of the ids; the very bytes if they are not found."""
        start, end = self.find(data)
        self._found = _NOTHING
        return data[: start - 1] + CUT + data[end + 1 :] if end else data

    def leave(self) -> None:
        """Cut nothing out any more: what was found stands elsewhere."""
        self.sent, self._whole = (), True

    def hear(self, said: Raw, *, cut: bool) -> None:
        """Take note of a raw member that says the ids; of what was not `cut` out, `CUT` is what an engine says. The first word counts."""
        if self.known:
            return
        value = given(said)
        if cut and value == CUT and self.sent:
            self.agreed = True
            return
        raw, packed = self._apart
        self._raw = raw if cut and value == CUT else value
        self._packed = packed if self._raw == raw else None  # read already, wherever they stood


def read_ids(echo: bytes) -> bytes | None:
    """Pack the ids of an engine's raw JSON list; `None` if it is none."""
    try:
        return ids.pack(_IDS.decode(echo)) if echo else None
    except (ValueError, OverflowError):
        return None


def spelled(echo: bytes, packed: bytes) -> ids.Pieces:
    """The ids of a raw JSON list as a fragment: the engine's own digits, unless it writes them otherwise than we do."""
    return (echo[1:-1],) if packed and not any(odd in echo for odd in _ODD) else ids.extended((), packed)


def given(raw: Raw) -> bytes:
    """What a raw member says; `b""` for `null`."""
    value = bytes(raw)
    return b"" if value == b"null" else value
