"""Test kit: a simulated engine that records the true token ids of every call.

`SimulatedEngine` serves vLLM's HTTP API with a real tokenizer and chat template. It returns the replies that a test defines, and records
every prompt and completion id. Needs the extra `testing`.
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
