"""ARCHITECTURE.md tells the truth about the tree, the names of the packages are ours, and nothing is pickled."""

import ast
import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shm", "gpu", "procs", "tools", "frontend")


def tracked() -> list[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listing.splitlines() if (ROOT / path).exists()]


def architecture() -> str:
    return (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def mentions(text: str) -> set[str]:
    """Every `path` in backticks that looks like a file or (ending in a slash) a folder."""
    return set(re.findall(r"`([\w.\-]+(?:/[\w.\-]*)+|[\w\-]+\.(?:py|md|toml))`", text))


def test_every_source_file_and_folder_has_its_line_in_the_architecture() -> None:
    told = mentions(architecture())
    sources = [path for path in tracked() if path.endswith(".py") and not path.startswith("tests/")]
    files = {path for path in sources if not path.endswith("__init__.py")}
    folders = {f"{parent.as_posix()}/" for path in tracked() for parent in Path(path).parents if parent != Path(".")}
    assert sorted((files | folders) - told) == []


def test_the_architecture_names_nothing_that_is_gone() -> None:
    there = set(tracked())
    there |= {f"{parent.as_posix()}/" for path in there for parent in Path(path).parents}
    gone = [
        path for path in mentions(architecture()) if path not in there and path.split("/")[0] in {*PACKAGES, "tests"}
    ]
    assert sorted(gone) == []


def test_the_sources_were_looked_at() -> None:
    assert {path.split("/")[0] for path in tracked() if path.endswith(".py")} >= set(PACKAGES)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_package_names_resolve_to_this_project(name: str) -> None:
    origin = importlib.import_module(name).__file__
    assert origin is not None
    assert Path(origin).resolve() == ROOT / name / "__init__.py"


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = [Path(path).parent.as_posix().replace("/", ".") for path in tracked() if path.endswith("/__init__.py")]
    assert sorted(listed) == sorted(there)


def modules() -> list[Path]:
    return [ROOT / path for path in tracked() if path.endswith(".py") and path.split("/")[0] in PACKAGES]


def test_every_module_says_what_it_owns() -> None:
    silent = [
        path for path in modules() if path.name != "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_nothing_is_pickled() -> None:
    unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    found = [
        f"{path}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and unsafe & {alias.name.split(".")[0] for alias in node.names})
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in unsafe)
    ]
    assert found == []


def test_no_test_folder_is_a_package() -> None:
    assert [path for path in tracked() if path.startswith("tests/") and path.endswith("__init__.py")] == []
