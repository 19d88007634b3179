"""Tables of figures: printed, in Markdown, and put into the pages of docs between `<!-- name -->` and `<!-- /name -->`."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import rich.table
from rich.console import Console

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
COLOURS = {"met": "green", "not met": "red", "out of reach": "yellow", "worse": "red", "better": "green"}


@dataclass(frozen=True)
class Table:
    """A table: `left` columns hold text, the others figures."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    left: int = 1

    @classmethod
    def of(
        cls, title: str, rows: Iterable[Any], columns: Sequence[tuple[str, Callable[[Any], object]]], caption: str = "", left: int = 1
    ) -> Self:
        """A table whose cells follow from rows: a column is its head and a function of a row."""
        return cls(title, [name for name, _ in columns], [[str(cell(row)) for _, cell in columns] for row in rows], caption, left)

    def markdown(self) -> str:
        """The table in Markdown, figures right-aligned."""
        rule = "|".join("---" if n < self.left else "--:" for n in range(len(self.head)))
        lines = [f"| {' | '.join(self.head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in self.rows)]
        return "\n".join([*lines, "", self.caption + "."] if self.caption else lines)

    def print(self, console: Console) -> None:
        """Prints the table; verdicts have their colours."""
        table = rich.table.Table(title=self.title, caption=self.caption or None)
        for n, name in enumerate(self.head):
            table.add_column(name, justify="left" if n < self.left else "right", no_wrap=n < self.left)
        for row in self.rows:
            table.add_row(*(f"[{COLOURS[cell]}]{cell}[/]" if cell in COLOURS else cell for cell in row))
        console.print(table)


def filled(text: str, parts: Mapping[str, str]) -> str:
    """The text of a page with the parts between the marks of their names replaced. `ValueError`: the page lacks one, or has it twice."""
    for name, inner in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if (text.count(begin), text.count(end)) != (1, 1):
            raise ValueError(f"the page must have {begin.strip()} and {end}, each once")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{inner}\n{end}{rest.partition(end)[2]}"
    return text


def write(page: str, parts: Mapping[str, str]) -> None:
    """Puts parts into a page of docs. Raises the errors of `filled`."""
    (DOCS / page).write_text(filled((DOCS / page).read_text(), parts))
    print(f"docs/{page}")


def write_page(page: str, parts: Callable[[dict[str, Any]], Mapping[str, str]], results: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    """Puts the parts of the run that the command line names into a page, and keeps its raw figures, which it returns, as `results`."""
    asked = argparse.ArgumentParser(description=f"Write docs/{page} from a run's raw figures.")
    asked.add_argument("raw", type=Path, help="bench/out/<time>.json")
    raw = asked.parse_args().raw
    found: dict[str, Any] = json.loads(raw.read_text())
    write(page, parts(found))
    kept = HERE / results(found)
    if raw.resolve() != kept:
        kept.write_text(json.dumps(found, separators=(",", ":")) + "\n")
        print(f"bench/{kept.name}")
    return found
