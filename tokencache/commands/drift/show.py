"""The figures of drift as tables for a terminal, readable at 80 columns and without colour."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tokencache.trajectories.drift_rates import DriftRates, total

UNNAMED = "(no adapter)"


def share(part: int, whole: int) -> str:
    """A share in percent; a dash where there is nothing to have a share in."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def name_of(row: DriftRates) -> str:
    """A harness and its model."""
    return f"{row.harness or UNNAMED}, {row.model}" if row.model else row.harness


def print_rates(console: Console, rows: Sequence[DriftRates]) -> None:
    """Print what drifted, what it would have cost, and why; `rows` is not empty."""
    shown = [*rows, total(rows)] if len(rows) > 1 else list(rows)
    drift = _table("Drift", "harness, model", "sessions", "turns", "drifted", "", "tokens", "")
    for row in shown:
        drift.add_row(name_of(row), f"{row.sessions:,}", f"{row.measured:,}", f"{row.drifted:,}", share(row.drifted, row.measured),
                      f"{row.drifted_tokens:,}", share(row.drifted_tokens, row.prompt_tokens))  # fmt: skip
    console.print(drift)
    causes = _table("Causes", "harness, model", "cause", "turns", "", "sites", "tokens")
    for row in shown:
        for place, (name, cause) in enumerate(row.causes.items()):
            label = "" if place else name_of(row)
            causes.add_row(label, name, f"{cause.turns:,}", share(cause.turns, row.measured), f"{cause.sites:,}", f"{cause.tokens:,}")
    if causes.row_count:
        console.print(causes)
    cost = _table("What text alone would have cost", "harness, model", "sequences", "with text alone", "trainable", "lost", "")
    for row in shown:
        if row.whole_sequences:
            cost.add_row(name_of(row), f"{row.whole_sequences:,}", f"{row.text_only_sequences:,}", f"{row.trainable_tokens:,}",
                         f"{row.trainable_tokens_lost:,}", share(row.trainable_tokens_lost, row.trainable_tokens))  # fmt: skip
    if cost.row_count:
        console.print(cost)
    whole = total(rows)
    if whole.whole_sequences < whole.sequences:
        console.print(
            f"Of {whole.sequences:,} sequences {whole.whole_sequences:,} were measured at every turn: only of these it is known what they "
            "would have cost. Export with ?drift=turns to measure all.",
            style="yellow",
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        left = not place or column == "cause"
        table.add_column(column, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    return table
