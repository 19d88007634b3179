"""Counts the work of a function: lines executed, and characters that functions in C look at. The count is the same on every machine."""

import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_CONSTANT = {"startswith", "endswith", "find", "rfind", "index", "append", "pop", "get", "join", "match", "group", "end", "start", "span"}
"""Methods whose work is not the length of their object: they stop early, or begin later in a text."""


class Work:
    """The work that was counted so far."""

    def __init__(self) -> None:
        self.done = 0

    def of(self, function: Callable[[], object]) -> int:
        """Count the work of a call."""
        before, tracer, profiler = self.done, sys.gettrace(), sys.getprofile()  # coverage is a tracer, too
        sys.settrace(self._line)
        sys.setprofile(self._call)
        try:
            function()
        finally:
            sys.setprofile(profiler)
            sys.settrace(tracer)
        return self.done - before

    def _line(self, *_: Any) -> Any:
        self.done += 1
        return self._line

    def _call(self, _: Any, event: str, called: Any) -> None:
        if event == "c_call":
            own = getattr(called, "__self__", None)
            looked_at = isinstance(own, str | bytes | bytearray) and called.__name__ not in _CONSTANT
            self.done += 1 + (len(own) if looked_at else 0)


class _Counted:
    """A regular expression that counts the characters it is given; that its steps grow with them is tested elsewhere."""

    def __init__(self, pattern: "re.Pattern[Any]", work: Work) -> None:
        self._pattern, self._work = pattern, work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pattern, name)

    def _counted(self, name: str, text: Any, args: tuple[Any, ...]) -> Any:
        found = getattr(self._pattern, name)(text, *args)
        if name == "match":
            self._work.done += 1 + (found.end() - found.start() if found else 0)
        else:
            self._work.done += 1 + len(text) - (args[0] if args else 0)
        return found

    def match(self, text: Any, *args: Any) -> Any:
        return self._counted("match", text, args)

    def fullmatch(self, text: Any, *args: Any) -> Any:
        return self._counted("fullmatch", text, args)

    def search(self, text: Any, *args: Any) -> Any:
        return self._counted("search", text, args)

    def finditer(self, text: Any, *args: Any) -> Any:
        return self._counted("finditer", text, args)

    def findall(self, text: Any, *args: Any) -> Any:
        return self._counted("findall", text, args)

    def sub(self, new: Any, text: Any) -> Any:
        self._work.done += 1 + len(text)
        return self._pattern.sub(new, text)


@contextmanager
def counting() -> Iterator[Work]:
    """Count the work of calls in the context, with all regular expressions of the package."""
    work = Work()
    replaced = []
    for module in [module for name, module in sys.modules.items() if name.startswith("tokencache.") and module is not None]:
        for name, value in list(vars(module).items()):
            if isinstance(value, re.Pattern):
                replaced.append((module, name, value))
                setattr(module, name, _Counted(value, work))
    gc.disable()  # a collection runs code of others
    try:
        yield work
    finally:
        gc.enable()
        for module, name, value in replaced:
            setattr(module, name, value)
