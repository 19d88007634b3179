"""Writes the parts of the documentation that are generated from code: `python -m tests.docs.reference`.

A page marks such a part with `<!-- generated: NAME -->` and `<!-- end -->`; the function of that name in `BLOCKS` writes what is between.
`lint.py` finds a page that is not up to date.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, get_args

import typer
import yaml

import tokencache
from tokencache import metrics
from tokencache.adapters.load import load_all
from tokencache.adapters.schema import Adapter
from tokencache.api.openapi import OPERATIONS, document
from tokencache.batching import selection
from tokencache.cli import app
from tokencache.client import Client, Session, errors
from tokencache.config import PREFIX
from tokencache.core.context_edits import Edit, EditRefusal
from tokencache.core.incidents import IncidentKind
from tokencache.core.outcome import CAUSES, OutcomeKind
from tokencache.core.reasons import Described, Reason
from tokencache.core.rules import RULES
from tokencache.core.turn import TurnMark
from tokencache.trajectories.values import DriftFigures, Figures, Incident, Link, ScoredTurn, Sequence, Trajectory, TurnSpan

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = {
    "grpo-loop": "examples/grpo_loop.py",
    "guessing": "examples/integrations/guessing.py",
    "trl-grpo": "examples/integrations/trl_grpo.py",
    "skyrl-experiment": "examples/integrations/skyrl_experiment.py",
    "guessing-verifiers": "examples/integrations/guessing_verifiers.py",
}
"""Programs that pages show, each by the name of its part: `example-NAME`."""
COMMANDS = typer.main.get_command(app).commands
_BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def linked(text: str) -> str:
    """Turn `docs/x.md`, as help texts name pages, into a link from a page in `docs`."""
    return re.sub(r"\bdocs/(?:[\w-]+/)*([\w-]+)\.md", lambda page: f"[{page[1]}]({page[0].removeprefix('docs/')})", text)


def settings(panel: str) -> str:
    """The settings in a panel of `tokencache serve --help`, each under its key in the configuration file."""
    parts = []
    for param in COMMANDS["serve"].params:
        if getattr(param, "rich_help_panel", None) == panel:
            text, _, default = param.help.removesuffix("]").partition(" [default: ")
            value = "" if param.is_flag else f" {param.metavar}"
            names = [f"`{param.opts[0]}{value}`", f"`{PREFIX}{param.name.upper()}`", *([f"default `{default}`"] if default else [])]
            parts.append(f"### {param.name}\n\n{' · '.join(names)}\n\n{linked(text)}\n")
    return "\n" + "\n".join(parts) + "\n"


def adapters() -> str:
    """The harnesses that have an adapter."""
    rows = [("adapter", "harness", "program", "dialects", "tested versions")]
    for name, adapter in load_all().items():
        program = f"`{adapter.program[0]}`" if adapter.program else "your script"
        rows.append((f"`{name}`", adapter.title, program, ", ".join(adapter.dialects), ", ".join(adapter.tested)))
    return table(*rows)


def _with_subcommands() -> Iterator[tuple[str, Any]]:
    """The commands and their subcommands, by the words that name them."""
    for name, command in COMMANDS.items():
        yield name, command
        for below, subcommand in getattr(command, "commands", {}).items():
            yield f"{name} {below}", subcommand


def command_line() -> str:
    """The help of every command but `serve`, as a terminal of 80 columns shows it."""
    parts = []
    for name, command in _with_subcommands():
        if name != "serve":
            with command.make_context(f"tokencache {name}", [], resilient_parsing=True, terminal_width=80) as context:
                parts.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n" + "\n".join(parts) + "\n"


def routes() -> str:
    """The operations of the trainer's API."""
    rows = [("route", "what it does")]
    for operation in OPERATIONS:
        parts = [operation.summary, operation.description]
        parts += [f"Body: [`{operation.body.__name__}`](openapi.json)."] if operation.body else []
        parts += [f"`?{parameter.name}=`: {parameter.description}" for parameter in operation.query]
        parts += [f"{status}: {why}" for status, why in operation.errors.items() if status != HTTPStatus.NOT_FOUND]
        rows.append((f"`{operation.method} {operation.path}`", " ".join(filter(None, parts))))
    return table(*rows)


def rules() -> str:
    """All rules, and where each was seen."""
    rows = [(f"`{rule.name}`", rule.kind, rule.verdict, ", ".join(rule.harnesses), rule.what, rule.source) for rule in RULES.values()]
    return table(("rule", "kind", "verdict", "harnesses", "what comes back", "where it was seen"), *rows)


def incidents() -> str:
    """The kinds of incidents and what happened."""
    rows = [(f"`{kind}`", "yes" if kind.hole else "no", kind.meaning, kind.missing) for kind in IncidentKind]
    return table(("kind", "hole", "what happened", "what is missing"), *rows)


def outcomes() -> str:
    """What the proxy sees of a session, and the outcome that follows."""
    rows = [(f"the incident `{kind}`", f"`{CAUSES[kind].kind}`") for kind in CAUSES if CAUSES[kind].lasting]
    for failure in dict.fromkeys(cause.kind for cause in CAUSES.values() if not cause.lasting):
        kinds = [
            f"`{kind}`" + (" (not 4xx but 429)" if cause.only_faults else "")
            for kind, cause in CAUSES.items()
            if cause.kind == failure and not cause.lasting
        ]
        rows.append((f"the newest incident of these, if no later turn began: {', '.join(kinds)}", f"`{failure}`"))
    rows.append(("no client received the reply of the newest turn (mark `unanswered`)", f"`{OutcomeKind.HARNESS}`"))
    rows.append(("the session is finished, and made no call", f"`{OutcomeKind.HARNESS}`"))
    return table(("what the proxy saw", "outcome"), *rows, ("anything else", f"`{OutcomeKind.OK}`"))


def incident_actions() -> str:
    """The kinds of incidents and what to do about each."""
    rows = [(f"`{kind}`", "yes" if kind.hole else "no", kind.action) for kind in IncidentKind]
    return table(("kind", "hole", "what to do"), *rows)


def described(head: str, names: Iterable[Described]) -> str:
    """Names with their meaning."""
    return table((head, "meaning"), *((f"`{name}`", name.meaning) for name in names))


def metric_families() -> str:
    """The metrics at `/metrics`."""
    rows = [("metric", "type", "labels", "meaning")]
    for family in metrics.REGISTRY._collector_to_names:
        name = family._name + ("_total" if family._type == "counter" else "")
        rows.append((f"`{name}`", family._type, ", ".join(f"`{label}`" for label in family._labelnames), family._documentation))
    return table(rows[0], *sorted(rows[1:]))


def attributes(*classes: type) -> str:
    """The members of values, as the docstrings of their classes explain them."""
    parts = []
    for cls in classes:
        listed = textwrap.dedent((inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0])
        rows = re.findall(r"^(\w[\w, ]*): (.*(?:\n +.*)*)", listed, re.MULTILINE)
        meanings = ((re.sub(r"\s+", " ", text), names.split(", ")) for names, text in rows)
        rows = [
            (", ".join(f"`{name}`" for name in names), linked(meaning.replace("`docs/", "docs/").replace(".md`", ".md")))
            for meaning, names in meanings
        ]
        parts.append(f"### {cls.__name__}\n\n{table(('member', 'meaning'), *rows)}")
    return "\n".join(parts)


def members(cls: type) -> str:
    """The members of one class, without its name."""
    return attributes(cls).partition("\n\n")[2]


def row_rules() -> str:
    """The rules that choose the rows of a batch."""
    rows = []
    for name, rule in inspect.getmembers(selection, inspect.isfunction):
        if rule.__module__ == selection.__name__ and not name.startswith("_") and rule is not selection.select:
            taken = [param for param in inspect.signature(rule).parameters if param not in {"trajectory", "sequence"}]
            shown = f"{name}({', '.join(taken)})" if taken else name
            rows.append(
                (f"`{shown}`", linked((inspect.getdoc(rule) or "").partition("\n\n")[0].replace("`docs/", "docs/").replace(".md`", ".md")))
            )
    return table(("rule", "what it does"), *rows)


def _parameters(method: Any) -> Iterator[str]:
    """The parameters of a method of the client, with the options that it takes by name."""
    for param in list(inspect.signature(method).parameters.values())[1:]:
        if param.kind is param.VAR_KEYWORD:
            yield from get_args(param.annotation)[0].__annotations__
        else:
            yield param.name if param.default is param.empty else f"{param.name}={param.default!r}"


def methods(cls: type) -> str:
    """The methods and properties of a class of the client, with the first paragraph of each docstring."""
    rows = []
    for name, method in inspect.getmembers(cls):
        if not name.startswith("_") and (inspect.isroutine(method) or isinstance(method, property)):
            what = (inspect.getdoc(method) or "").partition("\n\n")[0].replace("\n", " ")
            shown = f"{name}({', '.join(_parameters(method))})" if inspect.isroutine(method) else name
            rows.append((f"`{shown}`", linked(what)))
    return table((cls.__name__, "what it does"), *rows)


def client_errors() -> str:
    """The exceptions of the client."""
    found = sorted(vars(errors).values(), key=lambda error: getattr(error, "__name__", ""))
    rows = [
        (
            f"`{error.__name__}`" + (f" ({error.status})" if getattr(error, "status", 0) else ""),
            (inspect.getdoc(error) or "").partition("\n\n")[0],
        )
        for error in found
        if inspect.isclass(error) and issubclass(error, errors.ClientError) and error.__module__ == errors.__name__
    ]
    return table(("error", "meaning"), *rows)


def glossary() -> str:
    """The terms that the package defines, as a table with whole sentences."""
    found = re.findall(r"^([a-z][a-z ]*?)  +(\S.*)$", tokencache.__doc__.partition("Packages, in the order")[0], re.MULTILINE)
    return table(("term", "meaning"), *((term, f"{meaning[0].upper()}{meaning[1:]}.") for term, meaning in found))


def decisions() -> str:
    """The decisions, by their titles."""
    found = [
        (page.name, page.read_text().partition("\n")[0].removeprefix("# ").partition(". ")) for page in (DOCS / "decisions").glob("0*.md")
    ]
    return table(("record", "decision"), *((f"[{number}]({name})", title) for name, (number, _, title) in sorted(found)))


def example(path: str) -> str:
    """A program, as its file is."""
    return f"```python\n{(DOCS.parent / path).read_text()}```\n"


BLOCKS: dict[str, Callable[[], str]] = {
    "glossary": glossary,
    "decisions": decisions,
    "trajectory": lambda: attributes(Trajectory, Sequence, TurnSpan, Figures, DriftFigures, Incident, Link),
    "adapter-fields": lambda: members(Adapter),
    "edits": lambda: members(Edit),
    "scored-turn": lambda: members(ScoredTurn),
    "edit-refusals": lambda: described("refused", EditRefusal),
    "row-rules": row_rules,
    "client-methods": lambda: methods(Client) + "\n" + methods(Session),
    "client-errors": client_errors,
    **{f"example-{name}": partial(example, path) for name, path in EXAMPLES.items()},
    "settings-basic": lambda: settings("Basic options"),
    "settings-advanced": lambda: settings("Advanced options"),
    "adapters": adapters,
    "command-line": command_line,
    "routes": routes,
    "metrics": metric_families,
    "incidents": incidents,
    "outcomes": outcomes,
    "incident-actions": incident_actions,
    "rules": rules,
    "reasons": lambda: described("reason", Reason),
    "marks": lambda: described("mark", TurnMark),
}


def updated(page: str) -> str:
    """The text of a page with its generated parts written again, but for those that no function writes."""
    return _BLOCK.sub(lambda block: f"{block[1]}{BLOCKS[block[2]]()}{block[3]}" if block[2] in BLOCKS else block[0], page)


def llms(files: dict[str, str]) -> str:
    """The index of the documentation for language models (llmstxt.org): the pages of the site, each with its first sentence."""
    site = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}"]
    for section, pages in (part for entry in site["nav"] for part in entry.items() if isinstance(part[1], list)):
        lines += ["", f"## {section}", ""]
        for title, page in (part for entry in pages for part in entry.items()):
            path = page if isinstance(page, str) else page[0]
            begin = next(part for part in re.split(r"\n\n+", files[f"docs/{path}"]) if re.match(r"[A-Z`]", part)).replace("\n", " ")
            sentence = re.match(r".*?(?:\.(?=\s)|[.:]?$)", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", begin))[0].rstrip(":")
            lines.append(f"- [{title}](docs/{path}): {sentence}")
    return "\n".join(lines) + "\n"


def written(files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The files that contain something generated, by their paths from the root, each with the text that it should have."""
    yield "docs/openapi.json", json.dumps(document(), indent=1, ensure_ascii=False) + "\n"
    yield "llms.txt", llms(files)
    for name, text in files.items():
        if name.startswith("docs/") and "<!-- generated: " in text:
            yield name, updated(text)


if __name__ == "__main__":
    for name, wanted in written({str(path.relative_to(DOCS.parent)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}):
        (DOCS.parent / name).write_text(wanted)
