"""Writes the table of `docs/engines.md`: the results of each vLLM version, with and without the plugin."""

from dataclasses import dataclass, field

COLUMNS = {
    "level": "level that the probe finds",
    "chat": "chat",
    "chat, streamed": "chat, streamed",
    "messages": "Messages",
    "responses": "Responses",
    "prefix": "`required_prefix_token_ids`",
    "prefixes": "prompts by hash",
}


@dataclass
class Row:
    """One version, with the plugin or without."""

    version: str
    plugin: bool
    cells: dict = field(default_factory=dict)

    def count(self, column, done, of):
        """Add follow-up turns: `done` of them extend the previous turn."""
        before, total = self.cells.get(column, (0, 0))
        self.cells[column] = (before + done, total + of)

    def line(self):
        cells = [self.cells.get(column, "not run") for column in COLUMNS]
        texts = [f"{cell[0]} of {cell[1]}" if isinstance(cell, tuple) else cell for cell in cells]
        return "| " + " | ".join([self.version, "with" if self.plugin else "without", *texts]) + " |\n"


_ROWS = {}


def row(version, *, plugin):
    return _ROWS.setdefault((version, plugin), Row(version, plugin))


def write(path):
    """Replaces the table at the end of the page: this run's lines are new, those of versions that were not run stay."""
    page, _, table = path.read_text(encoding="utf-8").partition(_HEAD)
    lines = {_of(line): f"{line}\n" for line in table.splitlines() if line.startswith("|")}
    lines |= {(each.version, "with" if each.plugin else "without"): each.line() for each in _ROWS.values()}
    ordered = sorted(lines, key=lambda each: ([int(part) for part in each[0].split(".")[:2]], each[0], each[1] == "with"))
    path.write_text(f"{page}{_HEAD}{''.join(lines[each] for each in ordered)}<!-- /versions -->\n", encoding="utf-8")


_HEAD = "| " + " | ".join(["vLLM", "plugin", *COLUMNS.values()]) + " |\n|" + "---|" * (2 + len(COLUMNS)) + "\n"


def _of(line):
    version, plugin = line.split(" | ")[:2]
    return version.removeprefix("| "), plugin
