"""The documentation site builds without a warning, and its pages load nothing from other hosts."""

import re
import subprocess
import sys

from tests.docs.reference import DOCS


def test_the_site_builds_and_loads_nothing_from_other_hosts(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # and 404.html
    for page in pages:
        loaded = re.findall(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"', page.read_text())
        assert loaded == [], page.name


def test_a_broken_link_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[nowhere](missing.md#anchor)\n")
    settings = (DOCS.parent / "mkdocs.yml").read_text().partition("not_in_nav:")[0]
    (tmp_path / "mkdocs.yml").write_text(re.sub(r"^(hooks|extra_css).*\n", "", settings, flags=re.MULTILINE))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "missing.md" in done.stderr
