"""Counts lines of code and holds them down: limits per file and per function, with exceptions that may only shrink.

A line of code is a line that holds something other than blanks, a comment or a docstring. The checked-in table
`tools/size_exceptions.json` maps `path` or `path::Class.function` to the size it has now. A recorded item that grew
fails, and so does one that shrank without its entry being lowered (`--update` lowers and removes entries; it never adds
or raises one: that takes a hand and a reviewer). This module reads files only; it never imports what it measures.
"""

import argparse
import ast
import io
import json
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXCEPTIONS = Path("tools/size_exceptions.json")
# folder: (lines per file, lines per function). Tests are lists of cases, so they get more room.
LIMITS = {
    "shm": (300, 60),
    "gpu": (300, 60),
    "procs": (300, 60),
    "tools": (300, 60),
    "frontend": (300, 60),
    "tests": (500, 100),
}
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


@dataclass(frozen=True)
class Size:
    """One measured item: `key` is a path or path::qualified.name, `lines` its lines of code, `limit` its allowance."""

    key: str
    lines: int
    limit: int


def code_lines(source: str) -> set[int]:
    """Returns the 1-based numbers of the lines that hold code. Raises SyntaxError for text that is not Python."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Yields (qualified name, first line, last line) of every function, the nested ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node.lineno, node.end_lineno or node.lineno
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(node, f"{prefix}{node.name}." if named else prefix)  # type: ignore[attr-defined]


def measure(root: Path) -> tuple[list[Size], dict[str, int]]:
    """Measures every .py file below the folders of LIMITS. Returns all sizes, and the lines of code per folder.

    Raises SyntaxError, naming the file, for one that this Python cannot read.
    """
    sizes: list[Size] = []
    totals: dict[str, int] = {}
    for folder, (file_limit, function_limit) in LIMITS.items():
        for path in sorted((root / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            key = path.relative_to(root).as_posix()
            try:
                lines = code_lines(source)
            except SyntaxError as error:
                raise SyntaxError(f"{key}:{error.lineno}: {error.msg}") from error
            sizes.append(Size(key, len(lines), file_limit))
            totals[folder] = totals.get(folder, 0) + len(lines)
            for name, first, last in functions(ast.parse(source)):
                sizes.append(Size(f"{key}::{name}", sum(first <= n <= last for n in lines), function_limit))
    return sizes, totals


def judge(sizes: list[Size], exceptions: dict[str, int]) -> list[str]:
    """Returns one sentence for each item that breaks the ratchet; an empty list means that it holds."""
    known = {size.key: size for size in sizes}
    complaints = [f"{key}: has an exception but does not exist" for key in exceptions if key not in known]
    for size in sizes:
        allowed = exceptions.get(size.key)
        if allowed is None:
            if size.lines > size.limit:
                complaints.append(f"{size.key}: {size.lines} lines of code, the limit is {size.limit}")
        elif size.lines > allowed:
            complaints.append(f"{size.key}: grew from {allowed} to {size.lines} lines of code; it may only shrink")
        elif size.lines <= size.limit:
            complaints.append(f"{size.key}: within the limit now; remove its exception (--update does it)")
        elif size.lines < allowed:
            complaints.append(
                f"{size.key}: shrank from {allowed} to {size.lines}; lower its exception (--update does it)"
            )
    return complaints


def tightened(sizes: list[Size], exceptions: dict[str, int]) -> dict[str, int]:
    """Returns the exceptions with every entry lowered to what is there now, and those no longer needed left out."""
    over = {size.key: size.lines for size in sizes if size.lines > size.limit}
    return {key: min(allowed, over[key]) for key, allowed in exceptions.items() if key in over}


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Prints the totals and what breaks the ratchet. Returns 0 when it holds, 1 when not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="lower and remove entries of the table of exceptions")
    options = parser.parse_args(argv)
    table = root / EXCEPTIONS
    exceptions: dict[str, int] = json.loads(table.read_text(encoding="utf-8")) if table.exists() else {}
    try:
        sizes, totals = measure(root)
    except SyntaxError as error:
        print(error.msg, file=sys.stderr)
        return 1
    if options.update:
        exceptions = tightened(sizes, exceptions)
        table.write_text(json.dumps(exceptions, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    complaints = judge(sizes, exceptions)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    parts = ", ".join(f"{folder} {lines}" for folder, lines in totals.items())
    print(f"lines of code: {sum(totals.values())} ({parts}); exceptions: {len(exceptions)}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
