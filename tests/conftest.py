"""What holds for every run: hypothesis' settings, limits for runs that hang, which tests are chosen, and the last lines.

Hypothesis is loaded before the first test. Its pytest plugin otherwise loads it at the end of a run. pytest parses what it loads, and
CPython 3.11 raises `SystemError` ("AST constructor recursion depth mismatch") if a garbage collection runs finalizers of tests' objects
meanwhile.
"""

import functools
import gc
import os

import httpcore2
import pytest
from _pytest.unraisableexception import gc_collect_iterations_key

from tests.support import compatibility, forked, whole
from tests.support.limits import Limits
from tests.support.report import Figures

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # more threads only cost CPU: each process that runs an engine trains its tokenizer
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)  # each client would read all certificates: 20 ms

try:
    from tests.support import profiles
except ImportError:  # the interpreters of trainers do not have hypothesis
    profiles = None


def pytest_addoption(parser):
    whole.add_options(parser)
    parser.addini("run_limit", "seconds after which a run is interrupted", default="3600")
    parser.addoption("--figures", action="store_true", help="end with what was skipped and why, the slowest tests, and seconds by folder")


def pytest_configure(config):
    config.addinivalue_line("markers", "whole: repeats a kind in another combination; runs with --whole only")
    config.addinivalue_line("markers", "no_cover: what it runs is not counted (pytest-cov)")
    config.addinivalue_line("markers", "product: its parameters depend on each other, so each run has every combination of them")
    config.addinivalue_line("markers", "ran_with: a package that the test runs with, for docs/compatibility.json: trainer='verl'")
    config.stash[gc_collect_iterations_key] = 0  # pytest would search all objects at its end for warnings that are ignored
    config.pluginmanager.register(whole)
    config.pluginmanager.register(compatibility)
    if profiles:
        profiles.load()
    config.pluginmanager.register(Limits(config))
    if config.getoption("figures") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Figures(config))
    if compatibility.VARIABLE in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(compatibility.Compatibility(os.environ[compatibility.VARIABLE]))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without garbage collection, and exclude what was collected from it: a million objects, in each worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish():
    forked.stop()
