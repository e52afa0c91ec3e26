# SPDX-License-Identifier: BSD-3-Clause
"""The pages agree with the tree: links resolve, and the files, names and commands that they mention
exist.
"""

import functools
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "learn").glob("*.md")),
]
PAGES = [page for page in PAGES if "_build" not in page.parts]
# Worklogs keep the old names of removed things, and results.md has names of other projects, so
# these pages are not checked.
PRESENT = [page for page in PAGES if "worklog" not in page.parts and page.name != "results.md"]
SOURCES = {
    ".c",
    ".h",
    ".cpp",
    ".cu",
    ".cuh",
    ".py",
    ".pyi",
    ".cmake",
    ".toml",
    ".txt",
    ".ini",
    ".in",
    ".sh",
    ".md",
}
SUFFIXES = "c|h|cpp|cu|cuh|py|pyi|md|txt|json|csv|png|toml|so"
ROOMS = (
    "csrc",
    "ops",
    "torch_gpukern",
    "tests",
    "benchmarks",
    "examples",
    "learn",
    "tools",
    "cmake",
    ".ci",
)
# Names of other projects, of instructions and of hardware, and placeholders.
FOREIGN = set(
    "TORCH_BOX flash_attn_func flash_attn_varlen_func window_size m_old m_new swizzle_128B "
    "return_flash_attn_kwargs".split()
)
# The suffix of an instance's name, behind the kernel's name.
INSTANCE = re.compile(r"(_(f32|bf16|f16|f64|base|avx2|avx512|avx512bf16|amx|\d+(x\d+)+|k2))+$")
NEW = {"csrc/cpu/isa/gemm_dot.c"}  # docs/add_a_kernel.md creates it


def ident(page):
    return page.relative_to(ROOT).as_posix()


def prose(page):
    """The text outside of fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@functools.cache
def tree():
    """Every file of the tree that a page may name, and every word of its sources."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for room in (*ROOMS, "docs") for path in (ROOT / room).rglob("*")]
    files = [path for path in files if not {"__pycache__", "_build"} & set(path.parts)]
    words = {path.stem for path in files}
    for path in files:
        if (
            path.suffix in SOURCES
            and path.is_file()
            and path not in PAGES
            or path.name in ("Makefile", "run")
        ):
            words.update(re.findall(r"\w+", path.read_text()))
    return {path.relative_to(ROOT).as_posix() for path in files}, words


def anchor(heading):
    """The name that GitHub gives a heading."""
    text = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=ident)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, part = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{ident(page)} links to {target}"
        if part:
            anchors = map(anchor, re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE))
            assert part in anchors, f"{ident(page)} links to {target}, which has no such heading"


@pytest.mark.parametrize("page", PRESENT, ids=ident)
def test_files_that_are_named_exist(page):
    files, _ = tree()
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        if code.startswith(
            "python"
        ):  # test_commands_exist checks these; other files belong to the user
            continue
        for name in re.findall(rf"(?<![\w/.~<>*-])[\w./-]*\w\.(?:{SUFFIXES})(?![\w.(])", code):
            if name in NEW or name.startswith(("build/", "~", "docs/_build", "libgpukern")):
                continue
            assert any(
                f == name or f.endswith(name if name[0] == "_" else "/" + name.lstrip("./"))
                for f in files
            ), f"{ident(page)}: `{code}`"


def test_pages_of_kernels_name_their_files():
    """Each file of attention and of products on CUDA is on a page of docs/kernels."""
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "kernels").glob("*.md"))
    named = set(re.findall(r"[\w.]+", text))
    files, _ = tree()
    rooms = ("csrc/cuda/attn/", "csrc/cuda/product/")
    missing = [f for f in files if f.startswith(rooms) and Path(f).name not in named]
    assert not missing, f"on no page of docs/kernels: {', '.join(sorted(missing))}"


@pytest.mark.parametrize("page", PRESENT, ids=ident)
def test_names_that_are_mentioned_exist(page):
    """Checks words in code that look like names of this project: with an underscore inside, or
    starting with gk."""
    _, words = tree()
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        if "<" in code or "X" in re.findall(r"[A-Za-z]+", code):  # a placeholder
            continue
        for name in re.findall(
            r"(?<![\w.\"'-])[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+(?!\w|\*)", code
        ):
            known = len(name) < 4 or {name, INSTANCE.sub("", name)} & (words | FOREIGN)
            assert known, f"{ident(page)}: `{code}`: {name}"


@pytest.mark.parametrize("page", PRESENT, ids=ident)
def test_commands_exist(page):
    text = page.read_text()
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[
        1
    ].split()
    for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
        assert target in targets, f"{ident(page)}: make {target}"
    package = "\n".join(path.read_text() for path in (ROOT / "torch_gpukern").rglob("*.py"))
    commands = re.findall(r'add_parser\(\s*"(\w+)"', package)
    for command in re.findall(r"-m torch_gpukern (\w+)", text):
        assert command in commands, f"{ident(page)}: python -m torch_gpukern {command}"
    for script in re.findall(r"python3? ([\w/]+\.py)", text):
        assert (ROOT / script).exists(), f"{ident(page)}: python {script}"


@pytest.mark.parametrize("page", PAGES, ids=ident)
def test_no_table_is_torn(page):
    """Rows behind a blank line would be shown as a paragraph of pipes: a table starts with a header
    and a rule."""
    for block in re.split(r"\n\s*\n", prose(page)):
        lines = block.strip("\n").splitlines()
        if lines and lines[0].startswith("|"):
            assert len(lines) > 1 and re.fullmatch(r"\|[-| :]+\|", lines[1]), (
                f"{ident(page)}: {lines[0][:60]}"
            )


def test_a_broken_page_is_found():
    """`make docs` fails on what docs/whole.py finds."""
    nodes = pytest.importorskip("docutils.nodes", reason="docutils comes with `make docs`")
    pytest.importorskip("sphinx", reason="Sphinx comes with `make docs`")
    spec = importlib.util.spec_from_file_location("whole", ROOT / "docs" / "whole.py")
    whole = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(whole)

    def found(*parts):
        return list(whole.broken(nodes.section("", *parts)))

    text = nodes.paragraph("", "|i - j| of biases")
    assert found(text, nodes.bullet_list("", nodes.list_item("", text.deepcopy()))) == []
    assert found(nodes.paragraph("", "a\n| b | c |\n| d | e |")) == [
        "rows of a torn table: | b | c |"
    ]
    assert found(nodes.bullet_list("", nodes.list_item())) == ["an empty bullet"]
