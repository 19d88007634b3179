"""Drift: where a plain rendering of the same messages differs from the prompt that was sent.

Without the proxy an engine renders the harness's messages anew with every call. What that would have given is compared
with what was sent, token by token. A *site* is one place where they differ, and it has a cause: the words were changed
on the way, the template leaves something out, or nothing is different but the tokenization of the same text.
"""

import msgspec


class Site(msgspec.Struct, frozen=True):
    """One place where a plain rendering differs.

    Attributes:
        start, end: the half-open range of the prompt's tokens that the rendering has not.
        rendered: the ids that it has in their place.
        cause: `retokenized` (the same text in other tokens), a rule by which the reply there was forgiven, or `template`
            (the template writes it otherwise, or leaves it out).
        turn: the turn that sampled the tokens; `""` outside all replies.
    """

    start: int
    end: int
    rendered: tuple[int, ...]
    cause: str
    turn: str = ""


class Drift(msgspec.Struct, frozen=True):
    """How a turn's prompt differs from a plain rendering of its messages.

    Attributes:
        rendered: how many tokens the plain rendering has.
        tokens: how many of the prompt's tokens it has not, in their order.
        sites: where; empty if it is the very same prompt.
    """

    rendered: int
    tokens: int
    sites: tuple[Site, ...] = ()

    @property
    def at(self) -> int | None:
        """The first token of the prompt that differs; `None` if none does."""
        return self.sites[0].start if self.sites else None
