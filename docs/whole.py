# SPDX-License-Identifier: BSD-3-Clause
"""Sphinx: a page whose text came out broken is a warning, and `make docs` fails on one.

Rows of a table behind a blank line become a paragraph of pipes. A list item or a comment without
text becomes an empty bullet.
"""

from collections.abc import Iterator

from docutils import nodes
from sphinx.util import logging


def broken(page: nodes.Node) -> Iterator[str]:
    """What a reader of the page would stumble over, in words."""
    for paragraph in page.findall(nodes.paragraph):
        row = next((line for line in paragraph.astext().splitlines() if line[:2] == "| "), None)
        if row is not None:
            yield f"rows of a torn table: {row[:60]}"
    for item in page.findall(nodes.list_item):
        if not item.astext().strip() and not list(item.findall(nodes.image)):
            yield "an empty bullet"


def setup(app):
    def check(_app, page, name):
        for fault in broken(page):
            logging.getLogger(__name__).warning("%s", fault, location=name)

    app.connect("doctree-resolved", check)
    return {"parallel_read_safe": True, "version": "1"}
