"""A consumer of the queue, for a process of its own. Its arguments are: URL NAME FILE GROUP_SIZE.

It writes each step to a file before the next one, so that the file tells how far it came when it was killed.
"""

from __future__ import annotations

import os
import sys
import time

from tokencache.client import Client, ClientError, DeliveryExpiredError

LEASE = 3.0
"""Seconds. A delivery of a consumer that is killed and not started again goes to another one after this time."""


def consume(url: str, name: str, path: str, group_size: int) -> None:
    """Take and acknowledge deliveries until the process is killed."""
    with open(path, "a", encoding="utf-8") as file, Client(url, timeout=5.0) as client:  # noqa: PTH123 - as in an agent's script

        def note(step: str, delivery: object) -> None:
            names = ",".join(state.session for state in delivery.sessions)
            file.write(f"{time.time()} {step} {delivery.id} {names}\n")
            file.flush()
            os.fsync(file.fileno())

        while True:
            try:
                for delivery in client.follow(name, group_size=group_size, lease=LEASE):
                    # a store that fails costs a turn, and the trajectory says so
                    assert all(one.sequences or not one.complete for one in delivery.trajectories)
                    note("taken", delivery)
                    delivery.acknowledge()
                    note("acknowledged", delivery)
            except DeliveryExpiredError:
                continue
            except ClientError:
                time.sleep(0.1)  # the proxy or its store is down


def main() -> None:
    consume(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
