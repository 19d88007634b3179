"""Parses Python source in tests."""

import ast
import gc


def parse(source: str) -> ast.Module:
    """Return the syntax tree of a module.

    No garbage is collected meanwhile: on CPython 3.11, finalizers of other tests' objects that run inside `ast.parse` make it raise
    `SystemError: AST constructor recursion depth mismatch`.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()
