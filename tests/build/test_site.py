# SPDX-License-Identifier: BSD-3-Clause
"""The pages that `make docs` made, in a browser: nothing is wider than the window, and a search finds
its way. Skips where the site is not built or no browser is installed."""

import json
import re
from html import unescape
from pathlib import Path

import browser
import pytest

SITE = Path(__file__).resolve().parents[2] / "docs" / "_build" / "html"
# Loads each page into a frame of each width and notes what is wider than that.
MEASURE = """
<meta charset="utf-8"><pre id="found"></pre>
<script>
async function measure() {
  const wide = [];
  for (const page of PAGES)
    for (const width of [1280, 760]) {
      const frame = document.createElement("iframe");
      Object.assign(frame, { width, height: 800, src: page });
      document.body.append(frame);
      await new Promise((loaded) => (frame.onload = loaded));
      const { documentElement: root } = frame.contentDocument;
      if (root.scrollWidth > width) wide.push(`${page} at ${width}: ${root.scrollWidth}`);
      frame.remove();
    }
  document.getElementById("found").textContent = JSON.stringify({ pages: PAGES.length, wide });
}
onload = measure;
</script>
"""


@pytest.fixture(autouse=True)
def needed():
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: make docs")
    if not browser.found():
        pytest.skip("no browser is installed")


def test_no_page_is_wider_than_the_window(tmp_path):
    """A table of many columns scrolls in a box of its own."""
    pages = [path.as_uri() for path in sorted(SITE.rglob("*.html")) if "_static" not in path.parts]
    file = tmp_path / "measure.html"
    file.write_text(MEASURE.replace("PAGES", json.dumps(pages)))
    page = browser.dom(file.as_uri(), tmp_path / "profile", seconds=120)
    found = json.loads(browser.text_of(page, "found"))
    assert found == {"pages": len(pages), "wide": []} and len(pages) > 30


def test_a_search_for_how_do_i_finds_the_integrations(tmp_path):
    page = browser.dom((SITE / "search.html").as_uri() + "?q=how+do+i", tmp_path)
    results = re.findall(
        r'<a href="([\w/]+\.html)[^"]*"[^>]*>', page.split('id="search-results"')[1]
    )
    assert "how.html" in results[:3], results
    how = unescape((SITE / "how.html").read_text())
    assert "integrations.html#transformers" in how
