"""Prints the demo's results: the figures side by side, the verdict, and one drift token by token.

Everything is readable at 80 columns and without color.
"""

from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from operator import itemgetter

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tokencache.demo.alignment import align, wrap
from tokencache.demo.figures import DemoFigures, Generation, drift

_MEANINGS = {
    "rollouts": "runs of the agent",
    "turns": "model calls",
    "contiguous_turns": "first of a rollout, or prompt starts with all tokens of the turn before",
    "drifted_tokens": "other turns: tokens of the turn before that the prompt does not repeat, from the first difference on",
    "sequences": "runs of contiguous turns: training samples",
    "trainable_tokens": "sampled tokens in each rollout's first run: what is left if a rollout must be one sequence",
}
_GOOD = {"contiguous_turns": "turns", "sequences": "rollouts", "drifted_tokens": None}
_LABELS = ("sampled  ", "read as  ")
_MOST_LINES = 7


def opening(console: Console, engine: str, rollouts: int, turns: int) -> None:
    """Print what the demo does."""
    console.print(
        f"[bold]{rollouts} rollouts of {turns} turns, twice[/]: an agent that uses plain OpenAI chat completions, "
        f"first directly on the engine, then through tokencache. The engine is {escape(engine)}.\n",
        highlight=False,
    )


def table(console: Console, direct: DemoFigures, proxied: DemoFigures) -> None:
    """Print the figures with and without the proxy side by side."""
    shown = Table(show_lines=True)
    shown.add_column("figure", no_wrap=True)
    shown.add_column("directly", justify="right", no_wrap=True)
    shown.add_column("tokencache", justify="right", no_wrap=True)
    shown.add_column("what it counts", ratio=1, max_width=60)
    ours, theirs = direct.as_json(), proxied.as_json()
    for name, meaning in _MEANINGS.items():
        cells = [Text(f"{values[name]:,}", style=_style(name, values)) for values in (ours, theirs)]
        shown.add_row(name.replace("_", " "), *cells, Text(meaning, style="dim"))
    console.print(shown)


def _style(name: str, values: dict[str, int]) -> str:
    """Return green if a figure has its ideal value, red if not, and nothing if there is no ideal value."""
    if name not in _GOOD:
        return ""
    wanted = _GOOD[name]
    return "green" if values[name] == (values[wanted] if wanted else 0) else "red"


def verdict(console: Console, wrong: Sequence[str], turns: int, *, simulated: bool) -> None:
    """Print whether the engine confirms what the proxy exported."""
    if simulated:
        source = "the ground truth that the engine records of each call"
    else:
        source = "the ids that the engine returns for each call, which the demo reads between proxy and engine"
    if not wrong:
        console.print(
            f"[green]Verified by the engine[/]: the {turns} exported turns equal {source}, one to one: prompt ids, completion ids, "
            "log probabilities; loss mask 1 for sampled tokens, 0 elsewhere.\n",
            highlight=False,
        )
        return
    console.print(f"[red]NOT verified[/]. Differences from {source}:", highlight=False)
    for line in wrong[:10]:
        console.print(f"  {line}", highlight=False, markup=False)
    console.print(f"  {len(wrong)} differences in all\n", highlight=False)


def choose(logs: Sequence[Sequence[Generation]]) -> tuple[int, Generation, Generation] | None:
    """Choose a direct rollout whose second turn drifts. Returns its number and first two turns.

    The first reply must have ended on its own, because only then its last id locates its end in the second prompt.
    """
    for number, (first, second) in ((number, log[:2]) for number, log in enumerate(logs) if len(log) > 1):
        known = len(first.prompt)
        if second.prompt[:known] == first.prompt and first.completion[-1] in second.prompt[known:] and drift(first, second):
            return number, first, second
    return None


async def drift_shown(
    console: Console, example: tuple[int, Generation, Generation], spell: Callable[[Sequence[int]], Awaitable[list[bytes]]]
) -> None:
    """Print one drift in two aligned rows: a reply as it was sampled, and as the next turn's prompt contains it."""
    number, first, second = example
    rest = second.prompt[len(first.prompt) :]
    reread = rest[: rest.index(first.completion[-1]) + 1]
    lines = wrap(align(await spell(first.completion), await spell(reread)), console.width - len(_LABELS[0]))
    console.print(
        f"[bold]One drift, token by token[/]: the first reply of direct rollout {number}, the {len(first.completion)} "
        f"tokens that the policy [green]sampled[/], and the {len(reread)} that the engine [red]reads[/] in their place "
        "one turn later, after the harness has put the message into its history. A │ starts a token; · is a space, ⏎ a newline.\n",
        highlight=False,
    )
    for line in lines[:_MOST_LINES]:
        rows = ([(column.top, column.top_same) for column in line], [(column.bottom, column.bottom_same) for column in line])
        for label, row, colour in zip(_LABELS, rows, ("bold green", "bold red"), strict=True):
            text = Text.assemble((label, "dim"))
            for same, pieces in groupby(row, key=itemgetter(1)):
                text.append("".join(piece for piece, _ in pieces), style="" if same else colour)
            console.print(text, no_wrap=True, crop=False, overflow="ignore")
        console.print()
    if len(lines) > _MOST_LINES:
        console.print("… and so on.\n")
