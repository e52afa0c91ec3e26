# SPDX-License-Identifier: BSD-3-Clause
"""The pages that `make docs` made, in a browser: nothing is wider than the window, and a search finds
its way. These skip where the site is not built or no browser is installed. Pages of ops are made here
without Sphinx."""

import importlib.util
import json
import re
from html import unescape
from pathlib import Path

import browser
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "_build" / "html"
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


@pytest.fixture
def needed():
    if not (SITE / "index.html").exists():
        browser.lacks("the site is not built: make docs")


@pytest.mark.usefixtures("needed")
def test_no_page_is_wider_than_the_window(tmp_path):
    """A table of many columns scrolls in a box of its own."""
    pages = [path.as_uri() for path in sorted(SITE.rglob("*.html")) if "_static" not in path.parts]
    file = tmp_path / "measure.html"
    file.write_text(MEASURE.replace("PAGES", json.dumps(pages)))
    page = browser.dom(file.as_uri(), tmp_path / "profile", seconds=120)
    found = json.loads(browser.text_of(page, "found"))
    assert found == {"pages": len(pages), "wide": []} and len(pages) > 30


@pytest.mark.usefixtures("needed")
def test_a_search_for_how_do_i_finds_the_integrations(tmp_path):
    page = browser.dom((SITE / "search.html").as_uri() + "?q=how+do+i", tmp_path)
    results = re.findall(
        r'<a href="([\w/]+\.html)[^"]*"[^>]*>', page.split('id="search-results"')[1]
    )
    assert "how.html" in results[:3], results
    how = unescape((SITE / "how.html").read_text())
    assert "integrations.html#transformers" in how


@pytest.fixture(scope="module")
def ops():
    spec = importlib.util.spec_from_file_location("op_pages", ROOT / "docs" / "op_pages.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_op_has_a_page_with_shapes_and_cost(ops):
    pages = {name: ops.body(name, call) for name, call in ops.calls().items()}
    listed = (ROOT / "docs" / "operators.md").read_text()
    table = re.search(r"\| op \| does \| gradients \|\n\|[-|]+\n((?:\|.*\n)+)", listed)[1]
    named = {n for row in table.splitlines() for n in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert set(pages) == named
    for name, page in pages.items():
        assert f"<h1>{name}</h1>" in page and "<svg" in page and ">[" in page, name
        assert re.search(r"<h2>Its cost</h2><p>\d+ bytes ", page), name


def test_pictures_of_masks_show_what_the_rules_mean(ops):
    i, j = torch.arange(8)[:, None], torch.arange(12)
    want = {
        "flash_attn": [j <= i, j <= i + 4, (j <= i) & (j >= i - 3), (j - i).abs() <= 2],
        "paged_attn": [
            j <= i + 4,
            (j <= i + 4) & (j >= i + 1),
            torch.ones(8, 12, dtype=torch.bool),
        ],
    }
    same = (i >= 3) == (j >= 5)  # query and key are of one sequence
    last = torch.where(i < 3, i + 2, i + 4)  # the key at the query's own place
    want["flash_attn_varlen"] = [
        same,
        same & (j <= last),
        same & (j <= last) & (j >= last - 2),
    ]
    for name, (_, seen, forms) in ops.MASKS.items():
        for rules, keys in zip(forms, want[name], strict=True):
            assert torch.equal(seen(**rules), keys), (name, rules)
        drawn = ops.masks(name)
        assert drawn.count('fill="#88d27a"') == sum(int(keys.sum()) for keys in want[name])
