"""Habits: which harness is speaking, and what is therefore forgiven.

A value that was changed on the way (`cd <cwd> && ` taken off a command) is the model's own turn only if the harness is
known to change it just so, and that is said by its adapter. Which adapter applies is said, in this order, by the API
key's registration, by the path (`/h/<harness>/…`), by a header, or found out from the User-Agent where the adapter names
a telling one. A wrong guess costs nothing but segments: each rule proves on the reply itself that it is what happened.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from tokencache.adapters.schema import Adapter
from tokencache.core.rules import Leniency
from tokencache.errors import HarnessError

HEADER = "X-Tokencache-Harness"


class Habits:
    """The adapters at hand; `off` are the names of rules that are switched off."""

    def __init__(self, adapters: Mapping[str, Adapter], off: Iterable[str] = ()) -> None:
        off = frozenset(off)
        self._strangers = Leniency(off)
        self._known = {name: Leniency(off, frozenset(adapter.mutations.rules) - off) for name, adapter in adapters.items()}
        self._agents = [(re.compile(adapter.user_agent), name) for name, adapter in adapters.items() if adapter.user_agent]

    def leniency(self, harness: str) -> Leniency:
        """What is forgiven in a harness, `""` being one that nobody named.

        Raises:
            HarnessError: there is no adapter of this name.
        """
        if not harness:
            return self._strangers
        known = self._known.get(harness)
        if known is None:
            raise HarnessError(f"there is no adapter {harness[:80]!r}; there are {', '.join(self._known)}", param="harness")
        return known

    def recognise(self, user_agent: str) -> str:
        """Name the harness that sends this User-Agent; `""` if none is known by it."""
        return next((name for agent, name in self._agents if agent.search(user_agent)), "")


class Aliases:
    """Names that harnesses give the model, as shell patterns, and the model that is served under each; the first that fits counts."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = dict(patterns)

    def served(self, name: str, own: Mapping[str, str]) -> str:
        """The model that a name stands for; the session's `own` patterns are asked first."""
        for patterns in (own, self._patterns):
            for pattern, model in patterns.items():
                if fnmatchcase(name, pattern):
                    return model
        return name
