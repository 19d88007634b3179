"""Text to train the simulated model's tokenizer on, without a download.

A tokenizer is only as realistic as the text it was trained on: it must know whole English words, Python and JSON, or
every word would fall apart into letters and no two tokenizations of a reply would differ in an interesting way. Every
Python install carries such text: the sources of its own standard library, with their docstrings. A few lines of
conversation are added, in the shape that agents write.

The text is the same on every run of one Python install. Another Python version gives slightly different text, hence
other token ids: never store ids of the simulated tokenizer across installs.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = (
    "argparse", "inspect", "json.decoder", "typing", "datetime", "subprocess", "tarfile", "difflib", "logging", "http.client",
    "doctest", "pathlib", "optparse", "unittest.mock", "pydoc", "threading", "zipfile", "shutil", "statistics", "email.message",
)  # fmt: skip
"""Standard library modules whose sources are read, about a megabyte: old ones, written in Python, with long docstrings."""

_TALK = (
    "I should list the files first, then read the one that fails.",
    "Let me look at the test output. The function returns the wrong value when the list is empty.",
    "The user wants me to fix the bug. I need to find where the session is opened and closed.",
    "All done. I changed two files and the tests pass now. Is there anything else you would like me to do?",
    "The assistant answers the user. The system prompt tells the assistant which tools it has.",
    "Now I will write the new version, run the command again and check what it prints.",
)
_CALLS = (
    {"name": "bash", "arguments": {"command": "ls -la src && cat README.md", "timeout": 5000}},
    {"name": "read_file", "arguments": {"path": "/workspace/src/main.py", "offset": 1, "limit": 200}},
    {"name": "edit_file", "arguments": {"file_path": "tests/test_main.py", "old_string": "assert x == 1", "new_string": "assert x == 2"}},
    {"name": "search", "arguments": {"query": "weather in Paris", "max_results": 10, "recursive": True}},
)


def corpus() -> Iterator[str]:
    """Yield the training text piece by piece, always in the same order."""
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin).read_text(encoding="utf-8")
    for _ in range(40):
        yield from (f"{line}\n\n" for line in _TALK)
        yield from (f"\n{json.dumps(call)}\n" for call in _CALLS)
