"""Reads the list of mutants."""

import tomllib
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("mutants.toml")
PACKAGES = ("core", "proxy", "engine/template", "dialects", "store")


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A small fault.

    Attributes:
        name: its name.
        file: the file with the fault, relative to `tokencache`.
        lost: what a user would lose.
        old: the text in that file, which it contains once.
        new: the text in its place.
        tests: the tests that find it: ids of functions without parameters, or files; tried first.
    """

    name: str
    file: str
    lost: str
    old: str
    new: str
    tests: list[str] = []

    @property
    def path(self) -> str:
        """The file, relative to the repository."""
        return f"tokencache/{self.file}"

    @property
    def package(self) -> str:
        """The package of the file, one of `PACKAGES`."""
        return next(package for package in PACKAGES if self.file.startswith(f"{package}/"))

    @property
    def folder(self) -> str:
        """The folder with the tests of the package."""
        return f"tests/{self.package}"

    def applied(self, source: str) -> str | None:
        """Return the source with the fault; `None` if it does not contain the text exactly once."""
        return source.replace(self.old, self.new) if source.count(self.old) == 1 else None


def read() -> list[Mutant]:
    """Read the list."""
    return msgspec.convert(tomllib.loads(FILE.read_text())["mutant"], list[Mutant])


def exists(test: str, root: Path) -> bool:
    """Whether a repository has a test: the id of a function, a file or a folder."""
    file, _, function = test.partition("::")
    return (root / file).exists() and (not function or f"def {function}(" in (root / file).read_text())
