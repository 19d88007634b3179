"""The clocks of a machine, which a test sets."""

import contextlib
import time

import pytest

from tokencache.store import clock, memory
from tokencache.store.file.clock import FileClock


class Machine:
    """The clocks of a machine: the system's is set, the monotonic one only goes on."""

    def __init__(self, boot_id):
        self.system, self.running, self.boot_id = time.time(), 5000.0, boot_id

    def time(self):
        return self.system

    def monotonic(self):
        return self.running

    def go_on(self, seconds):
        self.system += seconds
        self.running += seconds

    def restart(self, seconds):
        """Start again, after some time."""
        self.system += seconds
        self.running = 1.0
        self.boot_id += "+" if self.boot_id else ""


@contextlib.contextmanager
def machine_of(boot_id="one"):
    """Substitutes the clocks. The file system's clock is set together with the system's."""
    machine = Machine(boot_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "time", machine)
        patch.setattr(memory, "time", machine)
        patch.setattr(clock.RECORD_CLOCK, "offset", machine.system - machine.running)
        patch.setattr(clock.RECORD_CLOCK, "_follows", False)
        patch.setattr("tokencache.store.file.clock._boot", lambda: machine.boot_id)
        patch.setattr(FileClock, "measure", lambda self: None)
        yield machine
