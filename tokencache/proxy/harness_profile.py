"""Finds out which harness sends a request, which rules apply to it, and which model names it uses.

A harness may change a value before it sends a reply back (it removes `cd <cwd> && ` from a command). The echo still counts as the model's
own turn only if the harness's adapter lists this change, or if the harness is unknown and the change itself leaves no doubt which reply it
was (`Rule.without_adapter`). The adapter is chosen, in this order, by the API key's registration, the path
(`/h/<harness>/…`), a header, or the User-Agent if the adapter has a pattern for it. A wrong choice may break a session into more sequences,
but never makes them inexact, because each rule checks on the reply itself that exactly this change was made.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from tokencache.adapters.schema import Adapter
from tokencache.core.rules import RULES, Leniency
from tokencache.errors import HarnessError

HEADER = "X-Tokencache-Harness"
_MOST_AGENTS, _LONGEST_AGENT = 256, 256
"""User-Agents that are remembered, and characters of one: each harness sends few, and each search takes 3 µs. A header may have 64 KiB."""


class HarnessProfiles:
    """The rules of each harness with an adapter; `off` has the names of rules that are switched off."""

    def __init__(self, adapters: Mapping[str, Adapter], off: Iterable[str] = ()) -> None:
        off = frozenset(off)
        certain = frozenset(rule.name for rule in RULES.values() if rule.without_adapter)
        self._unnamed = Leniency(off, certain - off)
        named = {name: frozenset(adapter.mutations.rules) or certain for name, adapter in adapters.items()}
        self._named = {name: Leniency(off, rules - off) for name, rules in named.items()}
        self._agents = [(re.compile(adapter.user_agent), name) for name, adapter in adapters.items() if adapter.user_agent]
        self._remembered = lru_cache(_MOST_AGENTS)(self._search)

    def leniency(self, harness: str) -> Leniency:
        """Return the rules that apply to a harness; `""` is an unknown harness, as is one whose adapter names no rules.

        Raises:
            HarnessError: there is no adapter with this name.
        """
        if not harness:
            return self._unnamed
        leniency = self._named.get(harness)
        if leniency is None:
            raise HarnessError(f"there is no adapter {harness[:80]!r}; the adapters are {', '.join(self._named)}", param="harness")
        return leniency

    def recognise(self, user_agent: str) -> str:
        """Return the name of the harness that sends this User-Agent; `""` if it is unknown."""
        return (self._remembered if len(user_agent) <= _LONGEST_AGENT else self._search)(user_agent)

    def _search(self, user_agent: str) -> str:
        for agent, name in self._agents:
            if agent.search(user_agent):
                return name
        return ""


class ModelAliases:
    """Maps model names of harnesses (shell patterns) to served models. The first pattern that matches counts."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = dict(patterns)

    def served(self, name: str, own: Mapping[str, str]) -> str:
        """Return the served model for a name, or the name if no pattern matches; the session's `own` patterns take precedence."""
        for patterns in (own, self._patterns):
            for pattern, model in patterns.items():
                if fnmatchcase(name, pattern):
                    return model
        return name
