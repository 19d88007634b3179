"""Probes engines of one kind once in a process: the first probe of another engine of that kind would ask the same and find the same.

Each proxy of a test has an engine of its own, and two thirds of what it costs to start them are the probe's sixty requests. Only an engine
that is as it was made is of a kind; every later probe of it asks for itself.
"""

import contextlib
import copy
import itertools
from types import SimpleNamespace

from tests.support.plugin_engine import PluginEngine
from tokencache.engine import model
from tokencache.testing import SimulatedEngine

_FOUND = {}
"""By kind of engine and settings of the proxy: the finding, and what the probe left in the engine."""
_COMING = {}
"""URL → engine and kind, for engines that were not probed yet."""
_NONE = SimpleNamespace()
_SCALARS = (bool, int, float, str, type(None))
_OWN = {"requests", "headers", "completions", "derendered", "generated", "tokenizations", "ground_truth", "faults"}
_AS_MADE = {kind: kind() for kind in (SimulatedEngine, PluginEngine)}


def kind_of(engine):
    """What determines the finding; `None` for an engine that has been asked, was changed, or misbehaves."""
    made = _AS_MADE.get(type(engine))
    if made is None or (type(engine.replies), vars(engine).keys()) != (type(made.replies), vars(made).keys()):
        return None
    added = (engine.images, engine.prefixes, engine.metadata) if isinstance(engine, PluginEngine) else ()
    parts = (engine, engine.weights, *added)
    replies = (engine.replies.seed, engine.replies.drift, engine.replies.eos)
    touched = any(getattr(engine, name) for name in _OWN) or engine.choose_fault or engine.replies.script
    if touched or any(getattr(part, name, None) for part in added for name in ("fault", "generate_fault", "experts")):
        return None
    scalars = [(type(part).__name__, name, value) for part in parts for name, value in vars(part).items() if isinstance(value, _SCALARS)]
    return (*(one for one in scalars if one[1] != "_started"), *replies, engine.tokenizer.chat_template)


@contextlib.contextmanager
def probed_once(engine, url, settings):
    """The first probe of `engine`, which serves at `url`, has the finding of the first engine of its kind."""
    kind = kind_of(engine)
    if kind is not None:
        _COMING[url] = engine, (kind, repr(sorted(settings.items())))
    try:
        yield
    finally:
        _COMING.pop(url, None)


_probe = model.probe


async def _probe_once(upstream, drivers, name="", *, known=None):
    engine, kind = _COMING.pop(upstream.url, (None, None))
    if kind is None or name:
        return await _probe(upstream, drivers, name, known=known)
    if kind in _FOUND:
        found, calls, left = _FOUND[kind]
        engine._calls = itertools.count(calls)  # the next reply is sampled as after a probe
        vars(getattr(engine, "prefixes", _NONE)).update(copy.deepcopy(left))
        return found
    found = await _probe(upstream, drivers)
    calls = next(engine._calls)
    engine._calls = itertools.count(calls)
    _FOUND[kind] = found, calls, copy.deepcopy(vars(getattr(engine, "prefixes", _NONE)))
    return found


model.probe = _probe_once
