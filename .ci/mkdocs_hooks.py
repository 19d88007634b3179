"""Hooks of mkdocs.yml."""

import logging
import re

from mkdocs.structure.pages import Page

_log = logging.getLogger("mkdocs.hooks")  # `mkdocs build --strict` fails if a logger of mkdocs warns


def on_page_content(html: str, **_: object) -> str:
    r"""Shows `\|` in a code span as `|`: GitHub needs the backslash within tables, Python-Markdown keeps it."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), html)


def on_post_page(output: str, page: Page, **_: object) -> None:
    """Checks a page of the site."""
    _warn(page.file.src_uri, output)


def on_post_template(output_content: str, template_name: str, **_: object) -> None:
    """Checks a page that has no source, such as 404.html."""
    _warn(template_name, output_content)


def _warn(name: str, html: str) -> None:
    """Warns if a page loads something from another host, which would see who reads the page."""
    for loaded in re.findall(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"', html):
        _log.warning("%s loads something from another host: %s. Put a copy into docs", name, loaded)
