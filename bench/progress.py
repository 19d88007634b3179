"""Prints how far a run is, and keeps its raw figures in bench/out."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

OUT = Path(__file__).parent / "out"


class Progress:
    """A run's console and clock."""

    def __init__(self) -> None:
        self.console, self._begun = Console(width=170), time.monotonic()

    @property
    def seconds(self) -> int:
        """Since the run began."""
        return round(time.monotonic() - self._begun)

    def say(self, words: str) -> None:
        """Prints what begins now, after the time."""
        self.console.print(f"[dim]{self.seconds:5} s[/] {words}")

    def keep(self, found: dict[str, Any], prefix: str = "", then: str = "") -> None:
        """Writes the raw figures to bench/out/PREFIXtime.json, and prints that name; `then` is what can be done with it."""
        OUT.mkdir(exist_ok=True)
        written = OUT / f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}.json"
        written.write_text(json.dumps(found) + "\n")
        self.console.print(f"{found['seconds']} s; raw figures in bench/out/{written.name}{then}")
