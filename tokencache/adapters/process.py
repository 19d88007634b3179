"""The harness as a child process: it has our input, output, terminal and working directory, and we end with its exit code."""

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from tokencache.adapters.load import AdapterError
from tokencache.adapters.schema import Adapter

_OF_A_SIGNAL = 128
"""Added to a signal's number, as shells do for a child that died by one."""


class ProgramNotFoundError(AdapterError):
    """The harness is not installed where programs are looked for; the message says how to install it."""


def find(adapter: Adapter, argv: Sequence[str], path: str | None) -> None:
    """Check that there is a program to start, looked for on this PATH.

    Raises:
        AdapterError: there is none named: this adapter wants the user's own script behind `--`.
        ProgramNotFoundError: it is not on the PATH.
    """
    if not argv:
        raise AdapterError(
            f"{adapter.title} is a library: name the program that uses it, for example: tokencache run {adapter.name} -- python agent.py"
        )
    if shutil.which(argv[0], path=path) is None:
        hint = f"; {adapter.title} is installed with: {adapter.install}" if adapter.program else ""
        raise ProgramNotFoundError(f"{argv[0]} is not on the PATH{hint}")


def run(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a program to its end and return its exit code, 128 + N if signal N ended it.

    SIGTERM and SIGHUP are passed on. SIGINT and SIGQUIT are not: a terminal sends them to the harness as well, and a
    harness that heard Ctrl-C twice would take it as the word to quit.

    Raises:
        AdapterError: the program cannot be started.
    """
    with _signals() as heard:
        try:
            child = subprocess.Popen(argv, env=env)  # noqa: S603 - what the user asked for
        except OSError as why:
            raise AdapterError(f"{argv[0]} cannot be started: {why.strerror}") from None
        heard.pass_to(child)
        code = child.wait()
    return code if code >= 0 else _OF_A_SIGNAL - code


class _Heard:
    """Passes signals on to the child; one that comes before there is a child waits for it."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def pass_to(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        while self._early:
            child.send_signal(self._early.pop(0))

    def pass_on(self, number: int, _frame: FrameType | None) -> None:
        if self._child is None:
            self._early.append(number)
        else:
            self._child.send_signal(number)


@contextlib.contextmanager
def _signals() -> Iterator[_Heard]:
    heard = _Heard()

    def leave_to_child(_number: int, _frame: FrameType | None) -> None:
        pass

    # Handlers, not SIG_IGN: that would be the harness's, too.
    handlers = {signal.SIGTERM: heard.pass_on, signal.SIGHUP: heard.pass_on, signal.SIGINT: leave_to_child, signal.SIGQUIT: leave_to_child}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
