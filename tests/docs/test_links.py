"""Links and paths in documents lead to something. `make docs` checks the links within `docs`; these tests check the others."""

import pkgutil
import re
from pathlib import Path

import pytest

from tests.support.syntax import parse

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "tokencache", "tests", "bench", "deploy", "examples", "harness_adapters")
FILES = [path for path in ROOT.iterdir() if path.is_file()] + [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
PAGES = sorted(path for path in FILES if path.suffix == ".md" and path.name != "CHANGELOG.md")
SOURCES = [path for path in FILES if path.suffix in {".py", ".yaml", ".yml", ".toml"} and ROOT / "tests/docs" not in path.parents]


NOT_PYTHON = {"tokencache.toml", "tokencache.rollouts", "tokencache.digest"}
"""A configuration file, and a key in the metadata of Parquet files."""


def name(path):
    return str(path.relative_to(ROOT))


def anchors(page):
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).strip()
        found |= {re.sub(r"\s", "-", words), re.sub(r"[\s-]+", "-", words)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_resolve(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in link and not link.startswith("mailto:"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            assert target.exists(), link
            assert page.parent != ROOT / "docs" or not path.startswith("../"), f"{link} is not part of the site"
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_in_code_spans_exist(page):
    paths = re.findall(r"`((?:tokencache|tests|docs|bench|deploy|harness_adapters)/[\w./-]+)(?::\w+)?`", page.read_text())
    paths += [
        f"tokencache/{path}" for path in re.findall(r"`((?:api|core|dialects|engine|proxy|server|store)/[\w./-]+)`", page.read_text())
    ]
    missing = [path for path in paths if not re.search(r"[A-Z]{4}", path) and not (ROOT / path).exists()]
    assert missing == []


def test_pages_that_code_names_exist():
    missing = [
        f"{name(source)}: {page}"
        for source in SOURCES
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", source.read_text())
        if not (ROOT / page).exists()
    ]
    assert missing == []


def resolves(dotted):
    """Whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return in_an_integration(dotted)
    return True


def in_an_integration(dotted):
    """Whether a dotted name is an integration, or defined in one: they import only where their framework is installed."""
    path = dotted.replace(".", "/")
    if not path.startswith("tokencache/integrations/"):
        return False
    if (ROOT / f"{path}.py").is_file():
        return True
    module, _, attribute = path.rpartition("/")
    source = ROOT / f"{module}.py"
    return source.is_file() and attribute in {getattr(node, "name", "") for node in parse(source.read_text()).body}


def test_names_in_integrations_are_looked_up():
    assert in_an_integration("tokencache.integrations.verl.TokencacheAgentLoop")
    assert not in_an_integration("tokencache.integrations.verl.Missing")
    assert in_an_integration("tokencache.integrations.nemo_gym.results")
    assert not in_an_integration("tokencache.integrations.missing")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_names_exist(page):
    dotted = set(re.findall(r"(?<![\w./:-])(tokencache(?:\.\w+)+)\b(?![/:-])", page.read_text())) - NOT_PYTHON
    assert [one for one in sorted(dotted) if not resolves(one)] == []
