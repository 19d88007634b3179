"""Test kit: a simulated engine that records the true token ids of every call.

`SimulatedEngine` serves vLLM's HTTP API with a real tokenizer and chat template. It returns the replies that a test defines, and records
every prompt and completion id. Needs the extra `testing`.

`engine`        the server: its routes, settings and state
`chat_request`  reads and checks a request; `errors` are its refusals
`prompt`        the ids of a prompt; `template` and `tokenizer` make them
`replies`       which reply a call gets
`completion`    generates a completion, from the prompt's ids to the last event; `generation` one reply step by step
`parser`        parses a completion's text into a message; `derender` serves that as a route
`wire`          the bodies of responses; `responses` sends them
`faults`        faults that a test requests
`ground_truth`  the true ids of every prompt and completion
`generate_route`  the route for prompts as ids
`weights`, `dev_mode`  weights that change: what they do, and the routes that replace them
`harness`       a scripted agent, which changes the history that it sends back as real ones do
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokencache.testing.engine import SimulatedEngine
    from tokencache.testing.faults import Fault
    from tokencache.testing.ground_truth import GroundTruthEntry
    from tokencache.testing.tokenizer import SimTokenizer, build_tokenizer

__all__ = ["Fault", "GroundTruthEntry", "SimTokenizer", "SimulatedEngine", "build_tokenizer"]

_MODULES = {
    "Fault": "faults",
    "GroundTruthEntry": "ground_truth",
    "SimTokenizer": "tokenizer",
    "SimulatedEngine": "engine",
    "build_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `python -m tokencache.testing.engine` does not find its own module already imported."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415

    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
