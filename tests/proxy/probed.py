"""Probes engines of one kind once in a process: the first probe of another engine of that kind would ask the same and find the same.

Each proxy of a test has an engine of its own, and two thirds of what it costs to start them are the probe's sixty requests. Only an engine
that is as it was made is of a kind; every later probe of it asks for itself.
"""

import contextlib
import copy
import itertools

from tokencache.engine import model
from tokencache.testing import SimulatedEngine

_FOUND = {}
"""By kind of engine and settings of the proxy: the finding, and what the probe left in the engine."""
_COMING = {}
"""URL → engine and kind, for engines that were not probed yet."""
_SCALARS = (bool, int, float, str, type(None))
_OWN = {"requests", "headers", "completions", "derendered", "generated", "tokenizations", "ground_truth", "faults"}
_AS_MADE = SimulatedEngine()


def kind_of(engine):
    """What determines the finding; `None` for an engine that has been asked, was changed, or misbehaves."""
    if (type(engine), type(engine.replies), vars(engine).keys()) != (SimulatedEngine, type(_AS_MADE.replies), vars(_AS_MADE).keys()):
        return None
    parts = (engine, engine.images, engine.prefixes, engine.metadata, engine.weights)
    replies = (engine.replies.seed, engine.replies.drift, engine.replies.eos)
    touched = any(getattr(engine, name) for name in _OWN) or engine.choose_fault or engine.replies.script or engine.metadata.experts
    faulty = engine.images.fault or engine.images.generate_fault or engine.prefixes.fault
    if touched or faulty:
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
        vars(engine.prefixes).update(copy.deepcopy(left))
        return found
    found = await _probe(upstream, drivers)
    calls = next(engine._calls)
    engine._calls = itertools.count(calls)
    _FOUND[kind] = found, calls, copy.deepcopy(vars(engine.prefixes))
    return found


model.probe = _probe_once
