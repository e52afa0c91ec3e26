# SPDX-License-Identifier: BSD-3-Clause
"""Sphinx: `make docs` makes the pages of docs/, the Python API from its docstrings and the C API
from its headers."""

import os
import re
import sys
from pathlib import Path

from hawkmoth.util import compiler
from sphinx.util import logging

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MADE = HERE / "_build"  # with what is made on the way
sys.path[:0] = [str(ROOT), str(HERE)]

import torch_gpukern  # noqa: E402

HEADERS = {path.name: path.read_text() for path in (ROOT / "csrc" / "include").glob("gpukern*.h")}
LEARN = ("ladder", "patterns", "profiling", "languages", "claims", "quiz")  # pages of learn/
# page of the site -> its file outside of docs/. `setup` gives Sphinx an empty page of each name, and
# fills it when it is read.
ELSEWHERE = {name: ROOT / "learn" / f"{name}.md" for name in LEARN} | {
    "learn": ROOT / "learn" / "README.md",
    "contributing": ROOT / "CONTRIBUTING.md",
}
PARTS = re.findall(r"#define GK_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", HEADERS["gpukern.h"])

project, author, copyright = "gpukern", "the gpukern authors", "the gpukern authors"
version = release = ".".join(PARTS)
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "hawkmoth"]
extensions += ["whole", "op_pages"]  # of this folder
exclude_patterns = ["_build"]
html_theme, html_title = "furo", f"gpukern {release}"
html_theme_options = {"footer_icons": []}
html_static_path, html_css_files = ["_static"], ["site.css"]
html_extra_path = ["../learn/play.html"]  # beside the pages, so that a link opens it
default_role = "code"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# `c`, `sh` and plain blocks; a shell block holds output, too
suppress_warnings = ["misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False


def setup(app):
    """Shows CONTRIBUTING.md and the pages of learn/ as pages of this folder."""
    for name in ELSEWHERE:
        (HERE / f"{name}.md").touch()

    def here(link):
        """A link of learn/X.md as one of docs/X.md."""
        target, part = link[1], link[2] or ""
        if re.match(r"[a-z]+:|#|$", target) or target.removesuffix(".md") in LEARN:
            return link[0]
        return f"]({target.removeprefix('../docs/') if target.startswith('../') else '../learn/' + target}{part})"

    def link(_app, page, text):
        if page in ELSEWHERE:
            text[0] = ELSEWHERE[page].read_text()
        if page in ELSEWHERE and page != "contributing":
            text[0] = re.sub(r"\]\(([^)\s#]*)(#[^)\s]*)?\)", here, text[0])
        text[0] = (
            text[0]
            .replace("](../CONTRIBUTING.md)", "](contributing.md)")
            .replace("../learn/README.md", "learn.md")
            .replace("[play.html](../learn/play.html)", '<a href="play.html">play.html</a>')
        )
        text[0] = re.sub(
            rf"\]\(\.\./((?:\.\./)*)learn/({'|'.join(LEARN)})\.md", r"](\1\2.md", text[0]
        )

    def is_complete(_app, env):
        known = {
            name for domain in ("c", "py") for name, *_ in env.get_domain(domain).get_objects()
        }
        wanted = re.findall(
            r"^GK_API [^(]*?(\w+)\(|^} (gk_\w+);", "".join(HEADERS.values()), re.MULTILINE
        )
        names = {c or struct for c, struct in wanted} | {
            f"torch_gpukern.{name}" for name in torch_gpukern.__all__
        }
        for name in sorted(names - known):
            logging.getLogger(__name__).warning("%s stands on no page", name)

    app.connect("source-read", link)
    app.connect("env-check-consistency", is_complete)


# ---- the headers ---------------------------------------------------------------------------------
def rest(lines: list[str]) -> list[str]:
    """Lines of a comment as reStructuredText: indented ones keep their breaks."""
    found: list[str] = []
    for line in lines:
        text = re.sub(r"([\\*|])", r"\\\1", line.strip())
        indented = line.startswith("  ")
        if found and indented != found[-1].startswith("| "):
            found.append("")
        found.append(f"| {text}" if indented else re.sub(r"_(?=\W|$)", r"\\_", text))
    return found


def comment(lines: list[str], indent: str = "") -> list[str]:
    """A documentation comment as hawkmoth reads it."""
    return [
        f"{indent}/**",
        *(f"{indent} * {line}".rstrip() for line in rest(lines)),
        f"{indent} */",
    ]


def documented(header: str) -> str:
    """A header with its comments before what they describe, as documentation. What has none gets
    an empty comment of reStructuredText: hawkmoth would leave it out, and an empty one it makes a
    bullet.

    The header's own comments stand behind the members, so that a struct is read at one glance.
    """
    header = header.removeprefix("/* SPDX-License-Identifier: BSD-3-Clause */\n")
    # a declaration that the formatter broke
    header = re.sub(r"(\bdouble|\bgk_tensor)\n\s+", r"\1 ", header)
    # hawkmoth passes it by
    header = re.sub(r" +union \{ +/\* .*? \*/\n(.*?)\n +\};", r"\1", header, flags=re.DOTALL)
    made: list[str] = []
    whole: list[str] = []
    pending: list[str] | None = None  # lines of the comment that stands before the next declaration
    lines = iter(header.splitlines())
    depth = 0
    for line in lines:
        section = re.fullmatch(r"/\* -+ (.*?) -+ \*/", line)
        if section:
            made += [*comment(whole), ""] if whole else []
            whole = []
            made += ["/**", f" * .. rubric:: {section[1]}", " */", ""]
            continue
        if line.lstrip().startswith("/*"):  # alone on its lines
            text = line.strip()
            while not text.endswith("*/"):
                text += "\n" + next(lines)
            if pending:
                made += [*comment(pending), ""]  # of no declaration in particular
            pending = [re.sub(r"^\s*\* ?", "", part) for part in text[2:-2].strip().splitlines()]
            continue
        if not line.strip():
            if pending:
                made += [*comment(pending), ""]
                pending = None
            made.append("")
            continue
        if re.fullmatch(r"#ifndef GPUKERN\w*_H", line) and pending:
            whole = pending  # of the header: before the first section, or it would be the macro's
        code, _, trailing = line.partition("/*")
        code, indent = code.rstrip(), " " * (len(line) - len(line.lstrip()))
        if line.startswith("#") or code.strip().startswith(("}", "extern")):
            made.append(code if not line.startswith("#") else line)
            while made[-1].endswith("\\"):  # a macro on several lines
                made.append(next(lines))
            depth += code.count("{") - code.count("}")
            if line.startswith("#define GK_") and "_INIT" in line and pending:
                made[-1:-1] = comment(pending)
            pending = None
            continue
        if trailing:
            while not trailing.endswith("*/"):  # on lines of its own behind the member
                trailing += " " + next(lines).strip().removeprefix("* ")
            pending = [trailing.removesuffix("*/").strip()]
        member = re.fullmatch(r"(\s+(?:const )?\w+ )(\*?\w+(?:, \*?\w+)+);", code)
        declared = [f"{member[1]}{name};" for name in member[2].split(", ")] if member else [code]
        for one in declared:
            if not made or not re.search(r"[(,]$", made[-1]) or depth:
                made += comment(pending or [".."], indent)
            made.append(one)
        depth += code.count("{") - code.count("}")
        pending = None
    return "\n".join(made) + "\n"


MADE.mkdir(exist_ok=True)
for name, header in HEADERS.items():
    (MADE / name).write_text(documented(header))
hawkmoth_root = str(MADE)
# libclang comes without headers: those of the compiler that built the library. hawkmoth would ask
# clang, which need not be here.
hawkmoth_autoconf: list[str] = []
hawkmoth_clang = [*compiler.get_include_args(os.environ.get("CC", "cc")), "-std=c11"]
