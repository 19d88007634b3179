"""Checks the documentation against the code and lists all that is wrong: `python -m tests.docs.lint`.

It runs no program that a page shows: tests do. `make docs` checks the links within the site, too, and that its pages load nothing from
other hosts. `test_lint.py` has a broken example for each check.
"""

import itertools
import os
import pkgutil
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

from typer import TyperException

from tests.deploy import reading
from tests.docs import reference
from tests.support.syntax import parse
from tokencache import metrics
from tokencache.adapters.load import shipped
from tokencache.adapters.schema import PLACEHOLDERS
from tokencache.config import Settings
from tokencache.core.incidents import IncidentKind
from tokencache.core.reasons import Reason
from tokencache.core.turn import TurnMark
from tokencache.engine.drivers.registry import DRIVERS
from tokencache.trajectories.formats.registry import FILE_FORMATS

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "tokencache", "tests", "bench", "deploy", "examples", "harness_adapters")
SUFFIXES = {".md", ".py", ".yaml", ".yml", ".toml"}
OPERATIONS = "docs/operations.md"
NOT_PYTHON = {"tokencache.toml", "tokencache.rollouts", "tokencache.digest"}
"""A configuration file, and keys in the metadata of Parquet files."""
SHOWN = {"docs/integrations/verl.md": "examples/integrations/verl_agent_loop.yaml"}
"""Pages that show an example within a list, each with its file. Others are generated."""
SHORT = {"examples/grpo_loop.py": 62}
"""The most lines of an example that shows how short a training loop is."""
MOST_WORDS = 50_570
"""The most words of `docs` that people write. Who shortens the pages lowers it; who adds something removes as much elsewhere."""
WRITTEN_WHOLE = ("docs/harnesses.md",)
"""Pages that tests write as a whole."""

Files = dict[str, str]
"""The texts of the repository's documents and sources, by their paths from its root."""
Problems = Iterator[tuple[str, int, str]]
"""File, line, and what is wrong and what to do."""


def read() -> Files:
    """Read all files that the checks look at."""
    paths = [*ROOT.iterdir(), *itertools.chain.from_iterable((ROOT / folder).rglob("*") for folder in FOLDERS)]
    paths = [path for path in paths if path.suffix in SUFFIXES or path.name in {"openapi.json", "llms.txt"}]
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(paths) if path.is_file()}


def pages(files: Files, pattern: str = "*.md") -> Iterator[tuple[str, str]]:
    """The pages whose paths match, without the changelog: it names what was."""
    return ((name, text) for name, text in files.items() if fnmatch(name, pattern) and name.endswith(".md") and name != "CHANGELOG.md")


def found(pattern: str, text: str, flags: re.RegexFlag = re.MULTILINE) -> Iterator[tuple[int, re.Match[str]]]:
    """Each match, with its line."""
    for match in re.finditer(pattern, text, flags):
        yield text.count("\n", 0, match.start()) + 1, match


def program(files: Files) -> str:
    """The source of the package, for words that a page quotes."""
    return "\n".join(text for name, text in files.items() if fnmatch(name, "tokencache/*.py"))


def table(text: str, heading: str = "") -> list[tuple[int, list[str]]]:
    """The rows of the first table after a heading of a page, each with its line."""
    lines = list(enumerate(text.splitlines(), 1))
    lines = list(itertools.dropwhile(lambda line: not line[1].startswith(heading), lines))
    rows = itertools.takewhile(lambda line: line[1].startswith("|"), itertools.dropwhile(lambda line: not line[1].startswith("|"), lines))
    return [(number, [cell.strip() for cell in line.strip("|").split(" | ")]) for number, line in rows][2:]


def compared(name: str, listed: list[tuple[int, str]], there: Collection[str], what: str) -> Problems:
    """What a page lists and does not exist, and what it does not list; `what` names a thing of the list."""
    yield from ((name, line, f"{what} `{one}` does not exist: remove it, or correct the name") for line, one in listed if one not in there)
    for one in sorted(set(there) - {one for _, one in listed}):
        yield name, listed[0][0] if listed else 1, f"{what} `{one}` is missing in this list: add it"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    made = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).strip()
        made |= {re.sub(r"\s", "-", words), re.sub(r"[\s-]+", "-", words)}
    return made


def links(files: Files) -> Problems:
    """Relative links lead to a file, and to a heading of it; those on the site do not leave it."""
    for name, text in pages(files):
        without_code = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
        for line, match in found(r"\]\((?!mailto:)([^)\s]+)\)", without_code):
            if "://" not in (link := match[1]):
                path, _, anchor = link.partition("#")
                target = Path(os.path.normpath((ROOT / name).parent / path)) if path else ROOT / name
                if not target.exists():
                    yield name, line, f"{link} leads nowhere: correct the path"
                elif name.startswith("docs/") and not target.is_relative_to(reference.DOCS):
                    yield name, line, f"{link} is not part of the site: name it in a code span"
                elif anchor and anchor not in anchors(text if not path else target.read_text()):
                    yield name, line, f"{link} names no heading: correct the anchor"


def paths_in_code_spans(files: Files) -> Problems:
    """Paths in code spans exist, from the root or from the package."""
    for name, text in pages(files):
        from_root = found(r"`((?:tokencache|tests|docs|bench|deploy|harness_adapters)/[\w./-]+)(?::\w+)?`", text)
        from_package = found(r"`((?:api|core|dialects|engine|proxy|server|store)/[\w./-]+)`", text)
        named = [(line, match[1], ROOT) for line, match in from_root]
        named += [(line, match[1], ROOT / "tokencache") for line, match in from_package]
        for line, path, folder in named:
            if not re.search(r"[A-Z]{4}", path) and not (folder / path).exists():
                yield name, line, f"`{path}` does not exist: correct the path"


def pages_that_code_names(files: Files) -> Problems:
    """Pages that comments, help texts and errors name exist."""
    for name, text in files.items():
        if not name.endswith((".md", ".json")) and not name.startswith("tests/docs/"):
            for line, match in found(r"(?<![\w/.-])(?:docs|harness_adapters)/[\w/-]+\.md\b", text):
                if not (ROOT / match[0]).exists():
                    yield name, line, f"{match[0]} does not exist: correct the path"


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return in_an_integration(dotted)
    return True


def in_an_integration(dotted: str) -> bool:
    """Whether a dotted name is an integration, or defined in one: they import only where their framework is installed."""
    path = dotted.replace(".", "/")
    if not path.startswith("tokencache/integrations/"):
        return False
    if (ROOT / f"{path}.py").is_file():
        return True
    module, _, attribute = path.rpartition("/")
    source = ROOT / f"{module}.py"
    return source.is_file() and attribute in {getattr(node, "name", "") for node in parse(source.read_text()).body}


def python_names(files: Files) -> Problems:
    """Dotted names of the package can be imported."""
    for name, text in pages(files):
        for line, match in found(r"(?<![\w./:-])(tokencache(?:\.\w+)+)\b(?![/:-])", text):
            if match[1] not in NOT_PYTHON and not resolves(match[1]):
                yield name, line, f"{match[1]} does not exist: correct the name"


def generated_parts(files: Files) -> Problems:
    """Generated parts are up to date, and each one that can be generated is on one page."""
    used = []
    for name, wanted in reference.written(files):
        lines = itertools.zip_longest(files[name].splitlines(), wanted.splitlines())
        for line, (old, new) in enumerate(lines, 1):
            if old != new:
                yield name, line, "this generated part is not up to date: run .venv/bin/python -m tests.docs.reference"
                break
    for name, text in pages(files, "docs/*"):
        for line, match in found(r"<!-- generated: ([\w-]+) -->", text):
            if match[1] in used or match[1] not in reference.BLOCKS:
                yield name, line, f"the part {match[1]} is on another page, too, or tests/docs/reference.py has none: remove it"
            used.append(match[1])
    for block in sorted(reference.BLOCKS.keys() - set(used)):
        yield "tests/docs/reference.py", 1, f"the part {block} is on no page: add its two comments to one"


def registries(files: Files) -> Problems:
    """The tables of formats and drivers name what their registries have."""
    for name, there, what in (("docs/formats.md", FILE_FORMATS, "format"), ("docs/drivers.md", DRIVERS, "driver")):
        named = [(line, one) for line, row in table(files[name]) for one in re.findall(r"`([\w-]+)`", row[0])]
        yield from compared(name, named, there, what)


def adapters(files: Files) -> Problems:
    """The page about adapters explains every field of those that exist, and every placeholder."""
    name = "docs/adapters.md"
    fields = {field for adapter in shipped().glob("*.toml") for field in tomllib.loads(adapter.read_text())}
    for field in sorted(fields - set(re.findall(r"`\[{0,2}([a-z_-]+)\]{0,2}`", files[name]))):
        yield name, 1, f"field `{field}` of an adapter is not explained: add it"
    for placeholder in sorted(set(PLACEHOLDERS) - set(re.findall(r"\{([a-z_]+)\}", files[name]))):
        yield name, 1, f"placeholder {{{placeholder}}} is not explained: add it"


def commands(files: Files) -> Problems:
    """Our commands in pages are accepted by the command line, and each topology starts a proxy."""
    for name, text in (("README.md", files["README.md"]), *pages(files, "docs/*")):
        shown = found(r"^    (?:\.venv/bin/)?tokencache ((?:.*\\\n)*.*)$", text)
        split = [(line, shlex.split(match[1].replace("\\\n", " "), comments=True)) for line, match in shown]
        for line, (command, *arguments) in split:
            try:
                with (
                    mock.patch.dict(os.environ, TOKENCACHE_ADMIN_KEY="a-long-random-secret"),
                    reference.COMMANDS[command].make_context(command, list(arguments)) as context,
                ):
                    if command == "serve":
                        Settings(**{key: value for key, value in context.params.items() if value is not None})
            except KeyError:
                yield name, line, f"tokencache has no command {command}: correct it"
            except (TyperException, ValueError) as error:
                yield name, line, f"tokencache {command} does not accept this: {' '.join(str(error).split())}"
        if fnmatch(name, "docs/topologies/[a-z]*") and "serve" not in {command for _, (command, *_) in split}:
            yield name, 1, "this topology shows no `tokencache serve`: add the command that starts the proxy"


def exposed(files: Files) -> Problems:
    """The operations page explains the metrics that exist, with their labels; pages that name one name one that exists."""
    families = {
        family._name + ("_total" if family._type == "counter" else ""): ", ".join(family._labelnames)
        for family in metrics.REGISTRY._collector_to_names
    }
    series = {name + (f"{{{labels}}}" if labels else "") for name, labels in families.items()}
    listed = [(line, row[0].strip("`")) for line, row in table(files[OPERATIONS], "## Metrics")]
    yield from compared(OPERATIONS, listed, series, "metric")
    for name in (OPERATIONS, "docs/deploy.md"):
        for line, match in found(r"`(tokencache_\w+)", files[name]):
            if match[1] not in families:
                yield name, line, f"metric `{match[1]}` does not exist: correct the name"


def alerts(files: Files) -> Problems:
    """The operations page explains the alerts that exist."""
    listed = [(line, row[0].strip("`")) for line, row in table(files[OPERATIONS], "## Alerts")]
    yield from compared(OPERATIONS, listed, {rule["alert"] for rule in reading.rules() if "alert" in rule}, "alert")


def log_lines(files: Files) -> Problems:
    """The log lines on the operations page are in the source. Values are `…` or KIND; the words between them are looked up."""
    source = program(files)
    for line, row in table(files[OPERATIONS], "## The log"):
        for shown in re.findall(r"`([^`]+)`", row[1]):
            for words in (part.strip(" :") for part in re.split("…|KIND", shown)):
                if words and not any(f"{before}{words}" in source for before in ('"', "'", " ", "\n")):
                    yield OPERATIONS, line, f"no log line has the words `{words}`: correct them"


def quoted_messages(files: Files) -> Problems:
    """Messages that the troubleshooting page quotes are in the source."""
    name, source = "docs/troubleshooting.md", program(files)
    without_spans = re.sub(r"`[^`\n]*`", "", files[name])
    for line, match in found(r'"([^"`\n]+)"', without_spans):
        if match[1] not in source:
            yield name, line, f'no message has the words "{match[1]}": correct them'


def names_of_kinds(files: Files) -> Problems:
    """ "incident `x`", "reason `x`" and "mark `x`" name one that exists."""
    known = {"incident": {*IncidentKind}, "reason": {*Reason}, "mark": {*TurnMark}}
    for name, text in pages(files, "docs/*"):
        for line, match in found(r"(?<!finish )\b(incident|reason|mark)s? `([\w-]+)`", text):
            if match[2] not in known[match[1]]:
                yield name, line, f"{match[1]} `{match[2]}` does not exist: correct the name"


def uncounted_incidents(files: Files) -> Problems:
    """The operations page names the incidents that no metric counts."""
    for line, match in found(r"counted in `tokencache_incidents_total` \(but\s+(.*?), which", files[OPERATIONS]):
        named = [(line, kind) for kind in re.findall(r"`([\w-]+)`", match[1])]
        on_reading = {"call-open", "torn-record", "rollout-canceled", "reward-outdated"}
        return compared(OPERATIONS, named, on_reading, "incident that is found on reading")
    return iter([(OPERATIONS, 1, "the incidents that are found on reading are not named: say which `tokencache_incidents_total` omits")])


def examples(files: Files) -> Problems:
    """Pages show examples as their files are, and an example is as short as it shall be."""
    for name, example in SHOWN.items():
        if textwrap.indent(files[example], "    ") not in files[name]:
            yield name, 1, f"the page does not show {example} as it is: copy the file into the page"
    for name, most in SHORT.items():
        if len(files[name].splitlines()) > most:
            yield name, most + 1, f"the example has more than {most} lines: shorten it"


def by_people(name: str, text: str) -> str:
    """A page without what is generated: parts between `<!-- generated: x -->` and `<!-- end -->`, or `<!-- x -->` and `<!-- /x -->`."""
    if name in WRITTEN_WHOLE:
        return ""
    return re.sub(r"<!-- (?:generated: [\w-]+ -->.*?<!-- end|([\w -]+) -->.*?<!-- /\1) -->", "", text, flags=re.DOTALL)


def too_long(files: Files) -> Problems:
    """The pages have no more words than the figure that is written down; what is generated does not count."""
    if (count := sum(len(by_people(name, text).split()) for name, text in pages(files, "docs/*"))) > MOST_WORDS:
        most = f"{MOST_WORDS:,} (MOST_WORDS in tests/docs/lint.py)"
        yield "docs", 1, f"the pages have {count:,} words, and may have {most}: shorten one by {count - MOST_WORDS:,}"


CHECKS: tuple[Callable[[Files], Problems], ...] = (
    links,
    paths_in_code_spans,
    pages_that_code_names,
    python_names,
    generated_parts,
    registries,
    adapters,
    commands,
    exposed,
    alerts,
    log_lines,
    quoted_messages,
    names_of_kinds,
    uncounted_incidents,
    examples,
    too_long,
)


def words(files: Files) -> str:
    """How many words the documents have, as `wc -w` counts them."""
    docs = list(pages(files, "docs/*"))
    written = sum(len(by_people(name, text).split()) for name, text in docs)
    generated = sum(len(text.split()) for _, text in docs) - written
    others = [text for name, text in files.items() if name.endswith(".md") and not name.startswith("docs/")]
    count = f"{written:,} words in {len(docs)} pages (at most {MOST_WORDS:,}), and {generated:,} that are generated"
    return f"docs: {count}; {sum(len(text.split()) for text in others):,} words in {len(others)} other documents"


def main(files: Files) -> int:
    """Print what is wrong, a line each, and the words; returns the exit code."""
    problems = sorted({problem for check in CHECKS for problem in check(files)})
    for name, line, what in problems:
        print(f"{name}:{line}: {what}")
    print(words(files))
    if problems:
        print(f"docs: {len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(read()))
