"""Groups the engines by the model that they serve: the policy, a frozen judge, the small model of a harness.

A group is named by the model that its engines list first. Every name that one of them lists, such as that of a LoRA adapter, leads to the
group, and there only to the engines that list it. A name that two groups list belongs to the one that is named so, otherwise to the first.

The engines of a group that serve have the same *identity* (`health`): the probe found the same, and template and tokenizer give the same
ids. If they differ, those with the highest level serve; among equals the larger part, then the part of the engine that was named first. The
others wait, and are probed again from time to time.
"""

from collections.abc import Collection, Iterable

from tokencache.engine.health import EngineIdentity, EngineMonitor
from tokencache.engine.probe import LEVELS


class EngineGroup:
    """The engines that serve one model, those that are drained or down included.

    Attributes:
        model: the name of the model.
        monitors: the monitors of the engines, in the order in which they were named.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.monitors: list[EngineMonitor] = []

    @property
    def names(self) -> list[str]:
        """The names under which its engines serve the model and its adapters, that of the model first."""
        return [*dict.fromkeys([self.model, *[name for monitor in self.monitors for name in monitor.engine.names]])]

    def serving(self, name: str) -> list[EngineMonitor]:
        """Return the engines that list a name; all if none does, because engines may accept more names than they list."""
        return [monitor for monitor in self.monitors if name in monitor.engine.names] or self.monitors

    def all_list(self, name: str) -> bool:
        """Whether all engines list a name, or have no list; also for `""`."""
        return not name or all(name in monitor.engine.names or not monitor.engine.names for monitor in self.monitors)

    def differences(self) -> dict[EngineMonitor, list[str]]:
        """Describe for each engine in what it differs from those that serve. Drained engines do not count."""
        known = {monitor: monitor.identity for monitor in self.monitors if monitor.identity is not None and not monitor.draining}
        identities = list(known.values())
        serving = max(identities, key=lambda one: (_rank(one), identities.count(one), -identities.index(one)), default=None)
        return {monitor: identity.differences(serving) for monitor, identity in known.items() if serving is not None}


def group_engines(monitors: Iterable[EngineMonitor]) -> dict[str, EngineGroup]:
    """Group engines, by the names of their models. An engine that was never probed is in no group."""
    groups: dict[str, EngineGroup] = {}
    for monitor in monitors:
        if monitor.identity is not None:
            model = str(monitor.identity.capability.get("model", ""))
            groups.setdefault(model, EngineGroup(model)).monitors.append(monitor)
    return groups


def group_named(groups: Collection[EngineGroup], name: str) -> EngineGroup | None:
    """Return the group that serves a name; `""` is the first one. `None` if none does. An engine without a list may serve any name."""
    if not name:
        return next(iter(groups), None)
    own = next((group for group in groups if group.model == name), None)
    listed = own or next((group for group in groups if name in group.names), None)
    return listed or next((group for group in groups if not all(monitor.engine.names for monitor in group.monitors)), None)


def _rank(identity: EngineIdentity) -> int:
    level = identity.capability.get("level")
    return LEVELS.index(level) if level in LEVELS else -1
