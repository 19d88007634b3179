"""Hooks of mkdocs.yml."""

import re


def on_page_content(html: str, **_: object) -> str:
    r"""Shows `\|` in a code span as `|`: GitHub needs the backslash within tables, Python-Markdown keeps it."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), html)
