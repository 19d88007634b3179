"""Loads hypothesis before the first test, and tells what a test that hangs waits for.

Hypothesis' pytest plugin otherwise loads it at the end of a run. pytest parses what it loads, and CPython 3.11 raises `SystemError` ("AST
constructor recursion depth mismatch") if a garbage collection runs finalizers of tests' objects meanwhile.
"""

import asyncio
import contextlib
import gc
import inspect
import os
import threading

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

with contextlib.suppress(ImportError):  # the interpreters of trainers do not have it
    import hypothesis  # noqa: F401


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Print what each task waits for just before `faulthandler_timeout` ends the process: its stacks show threads only."""
    seconds = 0.95 * float(item.config.getini("faulthandler_timeout"))
    timer = threading.Timer(seconds, _print_tasks, [item.nodeid, item.config.stash[fault_handler_stderr_fd_key]])
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


def _print_tasks(test, terminal):
    lines = [f"{test} hangs. Its tasks wait at:"]
    tasks = [thing for thing in gc.get_objects() if issubclass(type(thing), asyncio.Task)]  # `asyncio.all_tasks` needs a running loop
    for task in (task for task in tasks if not task.done()):
        lines += [f"  {task.get_name()}:", *(f"    {place}" for place in _waits(task.get_coro()))]
    os.write(terminal, "\n".join([*lines, ""]).encode())


def _waits(awaited):
    """The places of a coroutine and of what it awaits, outermost first."""
    while awaited is not None:
        if inspect.isasyncgen(held := next(iter(gc.get_referents(awaited)), None)):  # a step of it, which has no frame of its own
            awaited = held
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None) or getattr(awaited, "gi_frame", None)
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}" if frame else repr(awaited)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None) or getattr(awaited, "gi_yieldfrom", None)
