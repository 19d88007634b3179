"""The task: copy the word of one note to a file. The reward is read from the agent's folder, as a unit test would do it."""

import random
from dataclasses import dataclass
from pathlib import Path

NOTES = ("left", "right", "first")
WORDS = ("table", "group", "number", "message", "value", "field")
ANSWER = "answer.txt"


@dataclass(frozen=True)
class Task:
    """A folder with notes. Each has a word, and one of them is wanted."""

    words: dict[str, str]
    wanted: str

    @property
    def prompt(self) -> str:
        """Return what the agent is asked to do."""
        return f"Copy the word in {self.wanted}.txt to {ANSWER}."

    def prepare(self, folder: Path) -> None:
        """Write the notes."""
        folder.mkdir(parents=True)
        for note, word in self.words.items():
            (folder / f"{note}.txt").write_text(f"{word}\n")

    def reward(self, folder: Path) -> float:
        """Return 1 if the answer is the wanted word, else 0."""
        answer = folder / ANSWER
        return float(answer.is_file() and answer.read_text(errors="replace").split() == [self.words[self.wanted]])


def draw(chance: random.Random) -> Task:
    """Return a random task."""
    return Task(dict(zip(NOTES, chance.sample(WORDS, len(NOTES)), strict=True)), chance.choice(NOTES))
