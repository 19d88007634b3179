"""Loads hypothesis before the first test.

Its pytest plugin otherwise loads it at the end of a run. pytest parses what it loads, and CPython 3.11 raises `SystemError` ("AST
constructor recursion depth mismatch") if a garbage collection runs finalizers of tests' objects meanwhile.
"""

import contextlib

with contextlib.suppress(ImportError):  # the interpreters of trainers do not have it
    import hypothesis  # noqa: F401
