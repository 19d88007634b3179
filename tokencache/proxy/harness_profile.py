"""Knows the harnesses: which one sends a request, which rules apply to it, and which model names it uses.

A value that a harness changed before it sent it back (`cd <cwd> && ` removed from a command) still belongs to the model's own turn
only if this harness is known to make this change. Its adapter says so. The adapter is chosen, in this order, by the API key's
registration, the path (`/h/<harness>/…`), a header, or the User-Agent where the adapter names a pattern for it. A wrong choice costs
segments, never exactness: each rule checks on the reply itself that just this change was made.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from tokencache.adapters.schema import Adapter
from tokencache.core.rules import Leniency
from tokencache.errors import HarnessError

HEADER = "X-Tokencache-Harness"


class HarnessProfiles:
    """The rules of each harness that has an adapter; `off` are the names of rules that are switched off."""

    def __init__(self, adapters: Mapping[str, Adapter], off: Iterable[str] = ()) -> None:
        off = frozenset(off)
        self._unnamed = Leniency(off)
        self._named = {name: Leniency(off, frozenset(adapter.mutations.rules) - off) for name, adapter in adapters.items()}
        self._agents = [(re.compile(adapter.user_agent), name) for name, adapter in adapters.items() if adapter.user_agent]

    def leniency(self, harness: str) -> Leniency:
        """Return the rules that apply to a harness; `""` stands for an unnamed one.

        Raises:
            HarnessError: there is no adapter of this name.
        """
        if not harness:
            return self._unnamed
        leniency = self._named.get(harness)
        if leniency is None:
            raise HarnessError(f"there is no adapter {harness[:80]!r}; the adapters are {', '.join(self._named)}", param="harness")
        return leniency

    def recognise(self, user_agent: str) -> str:
        """Return the name of the harness that sends this User-Agent, `""` if none is known."""
        return next((name for agent, name in self._agents if agent.search(user_agent)), "")


class ModelAliases:
    """Names that harnesses give the model, as shell patterns, with the served model of each. The first pattern that matches counts."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = dict(patterns)

    def served(self, name: str, own: Mapping[str, str]) -> str:
        """Return the served model for a name; the session's `own` patterns come first."""
        for patterns in (own, self._patterns):
            for pattern, model in patterns.items():
                if fnmatchcase(name, pattern):
                    return model
        return name
