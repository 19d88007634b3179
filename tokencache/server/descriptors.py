"""File descriptors: the one limit on calls that the proxy cannot lift by itself.

A call that streams has two open: the harness's connection and the engine's. The soft limit, 1,024 on most machines, is raised to the
hard one at the start. What is left then is the machine's to say, and is said at the start: how many streams fit. Some are kept
back for what else is open: the store's connections (64), logs, trainers, the proxy's own questions to engines.
"""

import contextlib
import logging
import resource

log = logging.getLogger(__name__)

KEPT_BACK = 128
PER_STREAM = 2
FEW = 4096
"""Streams: less than this in one process is worth a warning."""


def raise_limit() -> int:
    """Raise the limit of open files as far as it may be raised, and say what fits; returns how many streams do."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, streams = resource.getrlimit(resource.RLIMIT_NOFILE)[0], streams_that_fit()
    if streams < FEW:
        log.warning(
            "ONLY %d STREAMS FIT AT A TIME: a process may open %d files, and a call that streams needs two; more harnesses than that "
            "wait to be heard. Raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, ulimits of compose)",
            streams,
            limit,
        )
    else:
        log.info("%d streams fit at a time: a process may open %d files", streams, limit)
    return streams


def streams_that_fit() -> int:
    """How many streams the limit of open files leaves room for; at least one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (limit - KEPT_BACK) // PER_STREAM)
