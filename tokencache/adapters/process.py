"""Runs the harness as a child process with this process's input, output, terminal and working directory, and returns its exit code."""

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from tokencache.adapters.load import AdapterError
from tokencache.adapters.schema import Adapter

_SIGNAL_EXIT = 128
"""Shells add this to the number of the signal that ended a child."""


class ProgramNotFoundError(AdapterError):
    """The program of the harness is not on the PATH. The message explains how to install it."""


def find(adapter: Adapter, argv: Sequence[str], path: str | None) -> None:
    """Check that the program to start is on this PATH.

    Raises:
        AdapterError: no program is named: this adapter needs the user's own program after `--`.
        ProgramNotFoundError: the program is not on the PATH.
    """
    if not argv:
        raise AdapterError(f"name the program to start, for example: tokencache run {adapter.name} -- python agent.py")
    if shutil.which(argv[0], path=path) is None:
        hint = f"; install {adapter.title} with: {adapter.install}" if adapter.program else ""
        raise ProgramNotFoundError(f"{argv[0]} is not on the PATH{hint}")


def run(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a program to its end and return its exit code; 128 + N if signal N ended it.

    SIGTERM and SIGHUP are passed on. SIGINT and SIGQUIT are not, because the terminal sends them to the harness too, and a harness that
    receives Ctrl-C twice quits.

    Raises:
        AdapterError: the program cannot be started.
    """
    with _signals() as forwarder:
        try:
            child = subprocess.Popen(argv, env=env)  # noqa: S603 - the user asked for this program
        except OSError as error:
            raise AdapterError(f"{argv[0]} cannot be started: {error.strerror}") from None
        forwarder.set_child(child)
        code = child.wait()
    return code if code >= 0 else _SIGNAL_EXIT - code


class _SignalForwarder:
    """Passes signals on to the child; keeps those that arrive before there is a child."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def set_child(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        while self._early:
            child.send_signal(self._early.pop(0))

    def forward(self, number: int, _frame: FrameType | None) -> None:
        if self._child is None:
            self._early.append(number)
        else:
            self._child.send_signal(number)


@contextlib.contextmanager
def _signals() -> Iterator[_SignalForwarder]:
    forwarder = _SignalForwarder()

    def leave_to_child(_number: int, _frame: FrameType | None) -> None:
        pass

    # The child would inherit SIG_IGN, but it does not inherit handlers.
    handlers = {
        signal.SIGTERM: forwarder.forward,
        signal.SIGHUP: forwarder.forward,
        signal.SIGINT: leave_to_child,
        signal.SIGQUIT: leave_to_child,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield forwarder
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
