"""A test kit for users: an engine to test against, whose books tell what truly happened.

`SimulatedEngine` speaks vLLM's HTTP API with a real tokenizer and chat template, says what a test tells it to say, and
records every prompt and completion id. Needs the extra `testing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokencache.testing.books import BookEntry
    from tokencache.testing.engine import SimulatedEngine
    from tokencache.testing.faults import Fault
    from tokencache.testing.tokenizer import SimTokenizer, build_tokenizer

__all__ = ["BookEntry", "Fault", "SimTokenizer", "SimulatedEngine", "build_tokenizer"]

_HOMES = {"BookEntry": "books", "Fault": "faults", "SimTokenizer": "tokenizer", "SimulatedEngine": "engine", "build_tokenizer": "tokenizer"}


def __getattr__(name: str) -> Any:
    """Import on first use: `python -m tokencache.testing.engine` must not find its own module loaded already."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
