"""What an agent needs of an official client, whichever it is: to say a history in its words, and to read what comes back.

A history is a list of `("user", text)`, `("reply", Reply)` and `("results", [(call's id, name, text)])`. A reply goes
back as the client gave it if it was this one that gave it, as its documentation has it; else, or if the client is
`forgetful`, it is written anew from what was read of it: text stripped, arguments in another order, no thoughts, no
signatures, no items' ids.
"""

from dataclasses import dataclass, field
from typing import Any

SYSTEM = "You are a careful agent — naïve ☕."
LIMIT = 2000


@dataclass
class Reply:
    """What the model said, read out of what a client gave (`native`). A call is (id, name, arguments as an object)."""

    dialect: str
    native: Any
    thought: str = ""
    text: str = ""
    calls: list = field(default_factory=list)
    ended: str = ""
    prompt_tokens: int = 0


def rewritten(arguments):
    """The same arguments, in another order."""
    return dict(sorted(arguments.items(), reverse=True))


class Client:
    """One dialect: `request` writes a history as the client's own arguments, `send` asks for a reply, `count` for its prompt's length."""

    name = ""

    def __init__(self, url, session, *, forgetful=False):
        self.forgetful = forgetful
        self.sdk = self.connect(f"{url}/s/{session}" if session else url)

    def native(self, reply):
        """What this client gave for a reply, if it was this one and it is to go back as it was."""
        return reply.native if reply.dialect == self.name and not self.forgetful else None

    def said(self, reply):
        """Thought and text as they go back if not as they were given."""
        return ("", reply.text.strip()) if self.forgetful else (reply.thought, reply.text)

    async def close(self):
        await self.sdk.close()
