"""What must be written down is: module docstrings, help texts, the tree in the README."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from asyncserve.cli import option_help
from asyncserve.config import ServerConfig
from tests.architecture.sources import PACKAGE, ROOT, parse, relative, source_files


@pytest.mark.parametrize("path", [*source_files(), *sorted((ROOT / "loadtest").glob("*.py"))], ids=relative)
def test_every_module_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(parse(path)) or ""
    assert len(docstring) >= 40, f"{relative(path)} has no docstring that says what it owns"


@pytest.mark.parametrize("option", [option.name for option in dataclasses.fields(ServerConfig)])
def test_every_option_has_a_help_text(option: str) -> None:
    text = option_help().get(option, "")
    assert len(text) >= 15, f"option {option} has no text"
    assert text.endswith("."), f"the text of option {option} is no sentence: {text}"


@pytest.mark.parametrize("package", ["loop", "gpu", "http", "metrics", "tracing", "kv_events", "token_path"])
def test_a_packages_docstring_names_each_of_its_files(package: str) -> None:
    docstring = ast.get_docstring(parse(PACKAGE / package / "__init__.py")) or ""
    for path in (PACKAGE / package).iterdir():
        if path.suffix == ".py" or (path / "__init__.py").exists():
            name = path.stem
            assert name.startswith("__") or re.search(rf"\b{name}\b", docstring), (
                f"{package}/{name} is not named"
            )


def test_the_tree_in_the_readme_is_the_real_tree() -> None:
    """Lines of the tree are indented by two spaces a level; a name ends with a slash if it is a folder."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.partition("\n## The tree\n")[2].partition("```")[2].partition("```")[0]
    folders: list[str] = []
    listed = set()
    for line in block.splitlines()[1:]:
        if not (found := re.match(r"( *)(\S+?)(/?)(?:\s|$)", line)):
            continue
        indent, name, slash = found.groups()
        folders[len(indent) // 2 :] = [name]
        if not slash:
            listed.add("/".join(folders))
    real = {
        path.relative_to(ROOT).as_posix()
        for folder in (PACKAGE, ROOT / "loadtest", ROOT / "monitoring")
        for path in folder.rglob("*")
        if path.suffix in {".py", ".toml", ".c", ".h"} and path.name != "__init__.py"
    }
    inside = {path for path in listed if path.startswith(("asyncserve/", "loadtest/", "monitoring/"))}
    assert inside == real, f"only in the README: {inside - real}; not in it: {real - inside}"
    for path in listed - inside:
        assert (ROOT / path).exists(), f"the README lists {path}, which is not there"
