"""Runs programs of `examples/`, as a reader would."""

import os
import signal
import subprocess

from rig.server import LIMIT_S, REPOSITORY

TRAINING_S = 3 * LIMIT_S
"""Limit of a program that trains, in seconds: it makes some hundred calls."""


def run_example(python, *arguments, env=None):
    """Run Python in the repository; returns its output. On timeout it gets SIGINT, so that it stops its engine itself.

    Torch has one thread: other tests use the other cores, and threads that wait for each other use a core, too.
    """
    env = (env or os.environ) | {"OMP_NUM_THREADS": "1"}
    command = [str(python), *map(str, arguments)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as child:
        try:
            output = child.communicate(timeout=TRAINING_S)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            output = child.communicate()
    assert child.returncode == 0, "\n".join(output)[-6000:]
    return output[0]
