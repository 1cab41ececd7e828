"""The ratchet counts code only, fails what grew, and cannot be loosened by its own --update."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.size_ratchet import LIMITS, Size, code_lines, functions, judge, main, tightened

SOURCE = '''"""Docstring
of two lines."""

# a comment
def f(
    a: int,
) -> int:
    """Doc."""

    text = """a string
    that is code"""
    return a  # trailing comment is code


class C:
    def g(self) -> None:
        pass
'''


def test_counts_neither_blanks_nor_comments_nor_docstrings() -> None:
    assert code_lines(SOURCE) == {5, 6, 7, 10, 11, 12, 15, 16, 17}


def test_names_functions_with_their_class() -> None:
    import ast

    assert [name for name, _, _ in functions(ast.parse(SOURCE))] == ["f", "C.g"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in LIMITS:
        (tmp_path / folder).mkdir()
    return tmp_path


def write(tree: Path, lines: int) -> None:
    (tree / "shm" / "long.py").write_text("".join(f"x{i} = {i}\n" for i in range(lines)))


def allow(tree: Path, table: dict[str, int]) -> None:
    (tree / "tools" / "size_exceptions.json").write_text(json.dumps(table))


def test_a_file_over_the_limit_fails_and_at_the_limit_passes(tree: Path) -> None:
    write(tree, 300)
    assert main([], tree) == 0
    write(tree, 301)
    assert main([], tree) == 1


def test_a_function_over_the_limit_fails(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "gpu" / "f.py").write_text("def f():\n" + "    x = 1\n" * 60)
    assert main([], tree) == 1
    assert "gpu/f.py::f: 61 lines of code, the limit is 60" in capsys.readouterr().err


def test_an_exception_may_only_shrink(tree: Path) -> None:
    allow(tree, {"shm/long.py": 350})
    for lines, verdict in ((350, 0), (351, 1), (349, 1), (10, 1)):
        write(tree, lines)
        assert main([], tree) == verdict, lines


def test_update_lowers_and_removes_but_never_raises_or_adds(tree: Path) -> None:
    table = tree / "tools" / "size_exceptions.json"
    allow(tree, {"shm/long.py": 350, "shm/gone.py": 400})
    write(tree, 340)
    assert main(["--update"], tree) == 0
    assert json.loads(table.read_text()) == {"shm/long.py": 340}
    write(tree, 360)
    assert main(["--update"], tree) == 1
    assert json.loads(table.read_text()) == {"shm/long.py": 340}
    allow(tree, {})
    assert main(["--update"], tree) == 1
    assert json.loads(table.read_text()) == {}


keys = st.sampled_from("abcd")


@given(st.dictionaries(keys, st.integers(1, 20)), st.dictionaries(keys, st.integers(1, 20)))
def test_tightened_is_never_looser_and_settles(lines: dict[str, int], exceptions: dict[str, int]) -> None:
    sizes = [Size(key, n, 10) for key, n in lines.items()]
    after = tightened(sizes, exceptions)
    assert all(after[key] <= exceptions[key] for key in after)
    assert tightened(sizes, after) == after
    # What tightening leaves to complain about is growth alone.
    assert all("grew" in text or "the limit is" in text for text in judge(sizes, after))
