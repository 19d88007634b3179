"""The glossary of the package and that of the documentation define the same terms, in the same order."""

import re
from pathlib import Path

import tokencache

PAGE = (Path(__file__).parents[2] / "docs/glossary.md").read_text()


def test_the_package_and_the_page_define_the_same_terms():
    package = re.findall(r"^([a-z][a-z ]*?)  +\S", tokencache.__doc__, re.MULTILINE)
    page = re.findall(r"^\| ([a-z][a-z ]*) \| [A-Z]", PAGE, re.MULTILINE)
    assert len(package) > 30
    assert package == page
    assert len(set(package)) == len(package)
