"""Every kernel of a step keeps the rules of `gpu/kernels/dependent_launch.py`, as far as its text shows it.

A kernel that breaks one is wrong once in a while, on some devices, under load.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncserve.gpu import kernels

FILES = sorted(Path(kernels.__path__[0]).glob("*.py"))
OF_THE_MODEL = {"weight_ptr", "bias_ptr", "gain_ptr", "q_weight_ptr", "k_weight_ptr", "frequencies_ptr"}
OF_THE_MODEL |= {"k_scale_ptr", "v_scale_ptr"}
"""What no kernel of a step writes."""

WRITTEN_LONG_BEFORE = {
    "_decode_kernel": {
        *("seq_lens_ptr", "query_start_ptr", "table_ptr", "slots_ptr"),
        *("cos_ptr", "sin_ptr"),
    }
}
"""By kernel, what the kernel launched just before it never writes."""


def kernels_of(source: str) -> Iterator[ast.FunctionDef]:
    """Yield what is launched: the decorated functions that ask which program they are."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list and "tl.program_id" in ast.unparse(node):
            yield node


def broken_rules(kernel: ast.FunctionDef) -> list[str]:
    """Return what a kernel does wrong, in words."""
    statements = [ast.unparse(statement) for statement in kernel.body]
    wait, begin = "wait_for_previous(USE_PDL)", "let_next_begin(USE_PDL)"
    text = ast.unparse(kernel)
    if statements.count(wait) != 1 or text.count(wait) != 1:
        return ["it does not wait just once, in every program"]
    place = statements.index(wait)
    known = OF_THE_MODEL | WRITTEN_LONG_BEFORE.get(kernel.name, set())
    broken = []
    if statements[place + 1 : place + 2] != [begin] or text.count(begin) != 1:
        broken.append("the next may not begin right behind the wait and nowhere else")
    # Pointers, and what was made of them: what they point at may be loaded before the wait or not.
    made_of: dict[str, set[str]] = {}

    def pointers(node: ast.AST) -> set[str]:
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        found = {name for name in names if name.endswith("_ptr")}
        return found.union(*(made_of.get(name, set()) for name in names))

    for statement in kernel.body[:place]:
        for node in ast.walk(statement):
            if isinstance(node, ast.Return):
                broken.append("a program may leave before the wait")
            elif isinstance(node, ast.Call):
                touched = {pointer for argument in node.args for pointer in pointers(argument)}
                if touched - known:
                    broken.append(f"{touched - known} before the wait")
                if "store" in ast.unparse(node.func) or "atomic" in ast.unparse(node.func):
                    broken.append("something is written before the wait")
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    made_of[ast.unparse(target)] = pointers(node.value)
    return broken


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_touch_only_the_model_before_they_wait_and_let_the_next_begin_behind_it(file: Path) -> None:
    for kernel in kernels_of(file.read_text(encoding="utf-8")):
        assert not broken_rules(kernel), kernel.name


def test_the_kernels_are_found() -> None:
    found = {kernel.name for file in FILES for kernel in kernels_of(file.read_text(encoding="utf-8"))}
    assert {"_prepare_rows", "_rms_norm", "_one_token", "_decode_kernel", "_finish_rows"} <= found


@pytest.mark.parametrize(
    "lines",
    [
        "x = tl.load(x_ptr); wait_for_previous(USE_PDL); let_next_begin(USE_PDL)",
        "at = x_ptr + row; x = tl.load(at); wait_for_previous(USE_PDL); let_next_begin(USE_PDL)",
        "tl.store(weight_ptr, row); wait_for_previous(USE_PDL); let_next_begin(USE_PDL)",
        "let_next_begin(USE_PDL); wait_for_previous(USE_PDL)",
        "wait_for_previous(USE_PDL); x = tl.load(x_ptr); let_next_begin(USE_PDL)",
        "wait_for_previous(USE_PDL)",
        "x = tl.load(x_ptr)",
    ],
)
def test_a_kernel_that_breaks_a_rule_is_found_out(lines: str) -> None:
    (kernel,) = kernels_of(
        f"@triton.jit\ndef kernel(x_ptr, weight_ptr, USE_PDL):\n    row = tl.program_id(0); {lines}\n"
    )
    assert broken_rules(kernel)
