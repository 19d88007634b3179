"""The interface an agent needs of any official client: write a history as its arguments, and read the answer.

A history is a list of `("user", text)`, `("reply", Reply)` and `("results", [(call's id, name, text)])`. A reply is sent back as the client
returned it, as its documentation recommends, if this client returned it. Otherwise, or if the client is `forgetful`, it is rebuilt from its
parsed content: text stripped, arguments in another order, no thoughts, no signatures, no item ids. A text may be `Pictured`.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SYSTEM = "You are a careful agent — naïve ☕."
LIMIT = 2000


class Pictured(NamedTuple):
    """A text, and images (PNG files) after it."""

    text: str
    images: Sequence[bytes]


def png_uri(image):
    return "data:image/png;base64," + base64.b64encode(image).decode()


@dataclass
class Reply:
    """The model's reply, parsed from what a client returned (`native`). A call is (id, name, arguments as an object)."""

    dialect: str
    native: Any
    thought: str = ""
    text: str = ""
    calls: list = field(default_factory=list)
    ended: str = ""
    prompt_tokens: int = 0


def rewritten(arguments):
    """The same arguments in another order."""
    return dict(sorted(arguments.items(), reverse=True))


class Client:
    """One dialect: `request` writes a history as the client's arguments, `send` requests a reply, `count` its prompt's length."""

    name = ""

    def __init__(self, url, session, *, forgetful=False):
        self.forgetful = forgetful
        self.sdk = self.connect(f"{url}/s/{session}" if session else url)

    def native(self, reply):
        """What this client returned for a reply, if it is to be sent back unchanged."""
        return reply.native if reply.dialect == self.name and not self.forgetful else None

    def thought_and_text(self, reply):
        """Thought and text of a rebuilt reply."""
        return ("", reply.text.strip()) if self.forgetful else (reply.thought, reply.text)

    async def close(self):
        await self.sdk.close()
