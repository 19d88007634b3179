"""Runs at the same time never get the same port."""

import subprocess
import sys

import pytest

from tests import ports

OTHER_RUN = "from itertools import chain; from tests import ports; ports.{turn} = chain([{own}], ports.{turn}); print(ports.{made}())"


@pytest.mark.parametrize(("made", "turn"), [("free_port", "_ports"), ("free_redis_port", "_redis_ports")])
def test_a_port_that_one_run_has_is_not_given_to_another(monkeypatch, made, turn):
    own = getattr(ports, made)()
    found = subprocess.run([sys.executable, "-c", OTHER_RUN.format(turn=turn, own=own, made=made)], stdout=subprocess.PIPE, check=True)
    assert int(found.stdout) != own
    monkeypatch.setattr(ports, turn, iter([own]))
    assert getattr(ports, made)() == own, "its own port, in its turn"
