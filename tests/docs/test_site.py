"""`make docs`, which `make lint` runs, fails if a link leads nowhere or a page loads something from another host."""

import re
import subprocess
import sys

from tests.docs.reference import DOCS
from tests.support.waiting import PATIENCE


def test_a_broken_link_and_a_foreign_image_fail_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[nowhere](missing.md#anchor)\n\n![foreign](https://example.com/a.png)\n")
    settings = (DOCS.parent / "mkdocs.yml").read_text().partition("not_in_nav:")[0].replace("[.ci/", f"[{DOCS.parent}/.ci/")
    (tmp_path / "mkdocs.yml").write_text(re.sub(r"^extra_css.*\n", "", settings, flags=re.MULTILINE))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode != 0
    assert "'missing.md'" in done.stderr
    assert re.search(r"index\.md.* loads something from another host.*https://example\.com/a\.png", done.stderr)
    assert "404.html" not in done.stderr
