# SPDX-License-Identifier: BSD-3-Clause
"""Checks the five laws of the rooms and the retired words (CONTRIBUTING.md), and that every file is
clean: license line, line lengths and so on.

    python tools/check_rooms.py [ROOT]

Prints each breach and exits with 1 if there is one. Needs only Python, neither a compiler nor
torch.
"""

import ast
import functools
import re
import sys
from pathlib import Path

C_SUFFIXES = {".c", ".h", ".cpp", ".cu", ".cuh"}
TEXT_SUFFIXES = C_SUFFIXES | {".py", ".md", ".txt", ".toml", ".cmake", ".yaml", ".in"}
ROOMS = (
    "csrc",
    "ops",
    "torch_gpukern",
    "tests",
    "benchmarks",
    "examples",
    "learn",
    "tools",
    "docs",
    "cmake",
)

# Law 1. The headers that files of each room may include. Headers of the C library have no slash and
# end in .h.
CSRC_INCLUDE = re.compile(
    r"<nvtx3/nvToolsExt\.h>|<(sys/|linux/|asm/|arm_|mach/|cuda)?[a-z0-9_]+\.h>|\"[\w/.]+\.(h|cuh|def)\""
    r"|GPUKERN_EPILOGUE_HEADER"  # a user's header with an epilogue of his own
)
OPS_INCLUDE = re.compile(
    r"<torch/(csrc/stable|csrc/inductor/aoti_torch/c|headeronly)/[\w/]+\.h>"  # the stable ABI
    r"|<[a-z_0-9]+>|<(cuda_runtime|cuda_runtime_api|pthread|math|stdint|string)\.h>|\"((core|formats|epilogue)/)?[a-z_]+\.h\""
)
ROAD_AROUND_OPS = {"ctypes", "cffi", "pybind11", "triton", "cupy", "numba"}

# Law 2.
ASM = re.compile(r"\b(asm|__asm__|__asm)\b\s*(volatile|__volatile__|goto)?\s*\(")

# Law 3.
ARCH_SUFFIX = re.compile(r"_sm\d+[a-z]?$")
ISA_MACRO = re.compile(
    r"#\s*(el)?if.*\b__(AVX\w*|SSE\w*|FMA|F16C|x86_64|i386|aarch64|ARM_\w+|riscv\w*)__?\b"
)

# Law 4. The definition of a tile, block or stage size, which belongs in a table.
TILE_NUMBER = re.compile(
    r"^\s*(#\s*define|enum\s*\{|(static )?(const(expr)?|const(expr)? static) \w+)\s*"
    r"(MR|NR|NV|MC|KC|NC|BM|BN|BK|BQ|BKV|STAGES|WARPS)\b\s*=?\s*\d"
)
TABLE_ROW = re.compile(r"(=\s*|^\s*)\{\s*-?\d")
TABLES = {"tiles.h", "scores_tiles.h", "blocks.h"}
# The register tile depends on the registers of the instruction set, so it is defined beside them.
REGISTER_TILES = "vec.h"

# Law 5. The files that an op has.
COMPANIONS = (
    "torch_gpukern/ops/{}.py",
    "tests/ops/test_{}.py",
    "benchmarks/bench_{}.py",
    "docs/worklog/{}.md",
)
# Retired words: (pattern of whole words in any case, the word to use, pattern of the paths where it
# is retired). Strings of C are exempt, because error texts stay. docs/worklog/ is history.
CUDA = r"csrc/cuda/|tests/(ops/kernels/test_pipeline|csrc/check_cuda_tile)"
RETIRED = (
    (
        r"turned(?! (on|off|into|out|up))|\w+_turned|turned_\w+",
        "swap-AB; of a copy: transposed",
        "",
    ),
    (r"in turns|by turns|takes? turns", "ping-pong; of measurements: alternately", ""),
    (r"copiers?", "producer", ""),
    (r"readers?|fillers?", "consumer, producer", CUDA),
    (
        r"slots?",
        "stage",
        r"csrc/cuda/(?!attn/\w+/(kv_cache_write|rope_kv_write|fwd_score)|rows/(sample_tokens|moe_unpermute))|tests/(ops/kernels/test_pipeline|csrc/check_cuda_tile)",
    ),
    (r"lets? go|let_go|LetGo", "release", ""),
    # in docs, "skewed" also describes warpgroups that are offset in time
    (r"skew(ed|s)?", "misaligned; the shift", r"(?!docs/)"),
    (r"begins? anywhere", "misaligned", ""),
    (r"few rows", "small M", ""),
    (r"parts? of k", "split-K, a split of k", ""),
    (r"(un)?trad(e|es|ed|ing)", "exchange through DSMEM", CUDA),
    (r"by the lanes(?! of)", "from registers", ""),
    (r"dense along", "K-major, MN-major", ""),
    (r"lies? above each other|pairs above each other", "a 2 x 1 cluster", ""),
    (r"twins?", "raw op; counterpart; copy", ""),
    (r"lent", "a view of the buffer", r"torch_gpukern/|tests/"),
    (r"units?|items?|pieces?", "tile, chunk, split", r"csrc/cuda/attn/paged/paged_"),
    (r"gk_c(pu|uda)_row", "instance", ""),
    (r"out_parts|lse_parts|part_rows", "out_splits, lse_splits, split_rows", ""),
)
RETIRED_IN_COMMENTS = ((r"class(es)?", "tuning key", r"(csrc|ops)/"),)
RETIRED = tuple(
    (re.compile(rf"\b({word})\b", re.IGNORECASE), say, re.compile(where))
    for word, say, where in RETIRED
)
RETIRED_IN_COMMENTS = tuple(
    (re.compile(rf"\b({w})\b"), say, re.compile(at)) for w, say, at in RETIRED_IN_COMMENTS
)
IDENTIFIER = re.compile(r"\b(?!__)(?=\w*(?:_|[a-z][A-Z]))[A-Za-z]\w*")  # with several words
VAGUE_NAMES = re.compile(r"^(common|utils?|misc|helpers?)$|_v\d+$")
# A switch over a dtype: its default must refuse by name, or call a function that does.
DTYPE = r"GK_(F32|BF16|F16|F64|I32|I64)"
REFUSES = r"gk_(no_case|stop_without_case|load|store)\(|return false"
# the first line of a source file
LICENSE = re.compile(r"(#!.*\n)?(#|//|/\*) SPDX-License-Identifier: BSD-3-Clause( \*/)?\n")
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
COMMENTED_CODE = re.compile(
    r"^\s*//\s*[\w:<>*&\[\]., \->]+(\(.*\)|[-+*|&]?=[^=].*);\s*$|^\s*#\s*if\s+0\b"
)


C_TOKEN = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\""  # a comment or a string


def without_comments(text: str) -> str:
    """C text with comments and strings replaced by blanks; line numbers stay."""

    def blank(match):
        found = match.group()
        return re.sub(r"[^\n]", " ", found) if found[0] == "/" else '""'

    return re.sub(C_TOKEN, blank, text, flags=re.DOTALL)


@functools.cache
def in_words(identifier: str) -> str:
    """An identifier as separate words: few_rows, FEW_ROWS4 and FewRows."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier)
    return re.sub(r"(?<=[A-Za-z])\d+", "", words).replace("_", " ")


def check_words(path: Path, text: str):
    """Finds retired words, also inside identifiers, but not in C strings."""
    name = path.as_posix()
    if name.startswith("docs/worklog/") or name in (
        "tools/check_rooms.py",
        "tests/build/test_rooms.py",
    ):
        return
    comments = ""
    if path.suffix in C_SUFFIXES:
        bare = list(re.sub(r"[^\n]", " ", text))
        for token in re.finditer(C_TOKEN, text, flags=re.DOTALL):
            if token[0][0] == "/":
                bare[token.start() : token.end()] = token[0]
        comments = "".join(bare)
        text = re.sub(C_TOKEN, lambda m: m[0] if m[0][0] == "/" else '""', text, flags=re.DOTALL)
    for words, of in (
        (RETIRED, text),
        (RETIRED, IDENTIFIER.sub(lambda found: in_words(found[0]), text)),
        (RETIRED_IN_COMMENTS, comments),
    ):
        words = [(word, say) for word, say, where in words if where.match(name)]
        # one search for all words first, because few files have any
        if not any_of(tuple(word for word, _ in words)).search(of):
            continue
        for number, line in enumerate(of.splitlines(), 1):
            for word, say in words:
                if found := word.search(line):
                    yield number, f"words: '{found[0]}' is retired; say: {say}"


@functools.cache
def any_of(words: tuple[re.Pattern, ...]) -> re.Pattern:
    """A pattern that finds what any of these finds. They have the same flags."""
    return re.compile(
        "|".join(word.pattern for word in words) or "(?!)", words[0].flags if words else 0
    )


def check_includes(room: str, text: str):
    allowed = CSRC_INCLUDE if room == "csrc" else OPS_INCLUDE
    for number, line in enumerate(text.splitlines(), 1):
        include = re.match(r"\s*#\s*include\s+(\S+)", line)
        if include and not allowed.fullmatch(include[1]):
            yield number, f"law 1: {room} may not include {include[1]}"
        if include and room == "ops" and include[1] in ('"core/internal.h"', '"kernels.h"'):
            yield number, "law 1: ops knows gpukern.h alone of csrc"


def check_c(path: Path, room: str, text: str):
    yield from check_includes(room, text)
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r'\s*#\s*include\s+".*(ladder|learn|patterns)/', line):
            yield number, "law 1: learn/ stands on the library, and nothing on learn/"
    code = without_comments(text)
    in_cuda = "cuda" in path.parts
    for number, (line, raw) in enumerate(zip(code.splitlines(), text.splitlines(), strict=True), 1):
        if ASM.search(line) and "cuda/ptx" not in path.as_posix():
            yield number, "law 2: assembly lives in csrc/cuda/ptx/ only"
        if re.search(r"\b__CUDA_ARCH(_\w+)?__\b", line):
            yield number, "law 3: the file name chooses the architecture, never a macro"
        if (
            ISA_MACRO.search(line)
            and path.name not in ("vec.h", "vec_int8.h", "features.c")
            and not in_cuda
        ):
            yield number, "law 3: only vec.h, vec_int8.h and features.c ask for an instruction set"
        if room == "csrc" and "ref" not in path.parts and TILE_NUMBER.search(line):
            if path.name not in TABLES and path.name != REGISTER_TILES:
                yield number, "law 4: a tile or block number belongs in tiles.h or blocks.h"
            elif not has_reason(text, number):
                yield number, "law 4: a number without its reason, on its line or the one above"
        if path.name in TABLES and TABLE_ROW.search(line) and not has_reason(text, number):
            yield number, "law 4: a row without its reason, on its line or the one above"
        if COMMENTED_CODE.search(raw):
            yield number, "commented-out code"
    yield from check_dtypes(text)
    if (
        path.suffix == ".cu"
        and ARCH_SUFFIX.search(path.stem)
        and path.stem.split("_")[-1] not in ("sm80", "sm90a")
    ):
        yield 1, "law 3: the suffix is _sm80, _sm90a or none"


def check_dtypes(text: str):
    """Finds switches over a dtype whose default would treat an unknown dtype as another one."""
    code = without_comments(text)
    for match in re.finditer(r"\bswitch \(.*?\n(\s*)\}", code, flags=re.DOTALL):
        labels, _, rest = match[0].partition("default:")
        if re.search(rf"case {DTYPE}:", labels) and rest and not re.search(REFUSES, rest):
            yield (
                code[: match.start() + len(labels)].count("\n") + 1,
                "a dtype without a case is refused: gk_no_case",
            )


def has_reason(text: str, number: int) -> bool:
    """Whether line `number` of a table, or the line above it, has a comment."""
    lines = text.splitlines()
    return bool(re.search(r"/\*|\*/|//", "".join(lines[max(number - 2, 0) : number])))


def check_python(path: Path, text: str):
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in ROAD_AROUND_OPS:
                yield (
                    node.lineno,
                    f"law 1: torch_gpukern reaches the kernels through torch.ops alone, not {name}",
                )
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from check_docstring(node)


def check_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
    """An entry of a section of a docstring is "name: what it is". Lines that go on are indented
    further, or the pages show them as an entry of their own."""
    text = ast.get_docstring(node) or ""
    for section in re.findall(
        r"^(?:Args|Attributes|Raises):\n((?: +\S.*\n?)+)", text, re.MULTILINE
    ):
        for line in section.splitlines():
            if line[4:5] != " " and not re.match(r"    \*{0,2}[\w./]+(, \*{0,2}\w+)*:", line):
                yield node.lineno, f"{node.name}: indent the lines of an entry: {line.strip()}"


# Small ops that share one file in ops/, one benchmark, one test and one worklog, while each has its
# own file in torch_gpukern/ops/; and ops that serve one room of torch_gpukern and have their
# companions there.
ROOM = {
    "distributed": (
        "torch_gpukern/{}/transport.py",
        "tests/distributed/test_{}.py",
        "benchmarks/bench_{}.py",
        "docs/worklog/{}.md",
    ),
    # masks and biases are arguments of flash_attn, whose benchmark and worklog cover them
    "attn_mask": ("torch_gpukern/ops/{}.py", "tests/ops/test_{}.py"),
    "flash_attn_masked": ("torch_gpukern/ops/{}.py",),
}
FAMILIES = {
    "rows": ("norm", "softmax", "glu", "rope", "cross_entropy"),
    "train": ("dropout", "adamw"),
}


def check_stems(root: Path):
    """Law 5: the five companion files of an op and its schema have the same stem."""
    schema = root / "ops" / "schema.cpp"
    for source in sorted((root / "ops").glob("*.cpp")):
        if source == schema or source.name == "namespace.cpp":
            continue
        members = FAMILIES.get(source.stem, (source.stem,))
        for companion in ROOM.get(source.stem, COMPANIONS):
            of_each = companion.startswith("torch_gpukern")
            for stem in members if of_each else (source.stem,):
                if not (root / companion.format(stem)).exists():
                    yield source, 1, f"law 5: {companion.format(stem)} is missing"
        named = rf"define_{source.stem}\b" if source.stem in FAMILIES else rf'"{source.stem}\b'
        if source.stem not in ROOM and schema.exists() and not re.search(named, schema.read_text()):
            yield source, 1, "law 5: ops/schema.cpp has no schema of this name"


def check_text(path: Path, text: str):
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield number, "unfinished: " + line.strip()
        if line != line.rstrip():
            yield number, "blanks at the end of the line"
    if text and not text.endswith("\n"):
        yield text.count("\n") + 1, "no newline at the end of the file"


def check(root: Path):
    """All breaches in the tree under `root`, as (path, line, text)."""
    for room in ROOMS:
        for path in sorted((root / room).rglob("*")):
            relative = path.relative_to(root)
            if (
                path.suffix not in TEXT_SUFFIXES
                or "egg-info" in str(relative)
                or "_build" in relative.parts
            ):
                continue
            text = path.read_text()
            found = [*check_text(relative, text), *check_words(relative, text)]
            if path.suffix in {".py", ".def"} | C_SUFFIXES and text and not LICENSE.match(text):
                found.append((1, "a source file begins with its SPDX line"))
            if room in ("csrc", "ops") and path.suffix in C_SUFFIXES:
                found += check_c(relative, room, text)
                if VAGUE_NAMES.search(path.stem):
                    found.append(
                        (1, "a file says what it holds: no common, utils, misc, helpers or _v2")
                    )
            if room == "torch_gpukern" and path.suffix == ".py":
                found += check_python(relative, text)
            yield from ((relative, number, breach) for number, breach in found)
    yield from (
        (path.relative_to(root), number, breach) for path, number, breach in check_stems(root)
    )
    if len(list((root / "tools").glob("*.py"))) > 5:
        yield Path("tools"), 1, "tools/ holds five scripts at most"


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    breaches = list(check(root))
    for path, number, breach in breaches:
        print(f"{path}:{number}: {breach}")
    print(f"{len(breaches)} breaches of the laws of the rooms")
    sys.exit(bool(breaches))


if __name__ == "__main__":
    main()
