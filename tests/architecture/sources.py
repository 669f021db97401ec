"""The package's source files and what each imports, read with `ast`: nothing is executed."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "asyncserve"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: `asyncserve.loop.engine`, `torch`; whether it stands at the top of the file."""

    module: str
    line: int
    is_at_top: bool


def source_files() -> list[Path]:
    """Return every source file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    """Return a file's path as people say it, and as pytest shows it."""
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """Return `loop.engine` for asyncserve/loop/engine.py, `loop` for its __init__.py, "" for the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[Import]:
    """Yield every import of a file, those inside functions and `if TYPE_CHECKING` included."""
    tree = parse(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, node in tree.body)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                # `from asyncserve.http import status` imports a module, not a name of one.
                inner = PACKAGE.parent.joinpath(*module.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                yield Import(
                    f"{module}.{alias.name}" if is_module else module, node.lineno, node in tree.body
                )
