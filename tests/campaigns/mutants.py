"""One-line faults of a module: the operators are cosmic-ray's, the choice of those that count is ours.

An operator is taken where its fault is one that somebody might make: another comparison at the boundary,
another sign, a constant off by one, a condition negated, a branch lost. Left out are faults that nobody can
see: in type annotations, in the text of messages, and in assertions, which only repeat what holds already.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

try:
    import cosmic_ray.plugins
    from cosmic_ray.ast import Visitor, get_ast
    from cosmic_ray.mutating import mutate_code
except ImportError:
    sys.exit("error: cosmic_ray is not installed: run .venv/bin/pip install cosmic-ray==8.7.0")

_SWAPS = {
    "Comparison": "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Is_IsNot IsNot_Is",
    "Binary": "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Div Mod_Div Pow_Mul LShift_RShift RShift_LShift "
    "BitAnd_BitOr BitOr_BitAnd BitXor_BitAnd",
    "Unary": "Delete_Not Delete_USub Delete_Invert",
}
_OTHERS = (
    "AddNot NumberReplacer ReplaceAndWithOr ReplaceOrWithAnd ReplaceTrueWithFalse ReplaceFalseWithTrue "
    "ReplaceBreakWithContinue ReplaceContinueWithBreak ZeroIterationForLoop ExceptionReplacer RemoveDecorator"
)
OPERATORS = (
    *(f"core/Replace{kind}Operator_{swap}" for kind, swaps in _SWAPS.items() for swap in swaps.split(" ")),
    *(f"core/{name}" for name in _OTHERS.split(" ")),
)


@dataclass(frozen=True)
class Mutant:
    """A fault that can be put into a module.

    Attributes:
        module: its path in the repository.
        occurrence: which of the operator's places in the module it is.
        line: number of the first line that differs.
        was: the lines that differ without the fault, stripped; ``now``: with it.
    """

    module: str
    operator: str
    occurrence: int
    line: int
    was: str
    now: str
    code: str


class Place(NamedTuple):
    """Where an operator can be applied; ``drawn_by``: the line, and which of the places in such lines."""

    module: str
    operator: str
    occurrence: int
    drawn_by: str


class _Places(Visitor):
    """In which lines each operator can be applied."""

    def __init__(self, operators: Mapping[str, Any]) -> None:
        self._operators = operators
        self.lines: dict[str, list[int]] = {name: [] for name in operators}

    def visit(self, node: Any) -> Any:
        for name, operator in self._operators.items():
            self.lines[name] += [start[0] for start, _ in operator.mutation_positions(node)]
        return node


class _Executed(ast.NodeTransformer):
    """Leaves what decides: no annotations, kinds of arguments, assertions, nor text of exceptions."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        """No matter whether an argument is given by position or by name."""
        node.defaults += [default for default in node.kw_defaults if default is not None]
        node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Pass()

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
        return node


def decides(code: str) -> str:
    """What a module's code does, in a form to be compared.

    Raises SyntaxError if it is no code.
    """
    return ast.dump(_Executed().visit(ast.parse(code)))


def places(sources: Mapping[str, str]) -> list[Place]:
    """All places of modules; some turn out to be faults that nobody can see."""
    found = []
    operators = {name: cosmic_ray.plugins.get_operator(name)() for name in OPERATORS}
    for module, source in sources.items():
        visitor, text = _Places(operators), source.splitlines()
        visitor.walk(get_ast(source))
        for name, lines in visitor.lines.items():
            step = 2 if name == "core/NumberReplacer" else 1  # one more, and not one less as well
            same = Counter[str]()
            for i, line in enumerate(lines):
                same[text[line - 1].strip()] += 1
                drawn_by = f"{text[line - 1].strip()} {same[text[line - 1].strip()]}"
                found += [Place(module, name, i, drawn_by)] if i % step == 0 else []
    return found


def mutants(sources: Mapping[str, str], where: Iterable[Place], seed: int) -> Iterator[Mutant]:
    """The mutants at these `places` of modules in an order drawn with ``seed``.

    Those of a line keep their order among each other when another line or module changes.
    """
    drawn = {
        place: hashlib.sha256(f"{seed} {place.module} {place.operator} {place.drawn_by}".encode()).digest()
        for place in where
    }
    whole = {module: decides(source) for module, source in sources.items()}
    seen = set()
    for module, operator, occurrence, _ in sorted(drawn, key=drawn.__getitem__):
        code = mutate_code(sources[module], cosmic_ray.plugins.get_operator(operator)(), occurrence)
        try:
            if code is None or (module, code) in seen or decides(code) == whole[module]:
                continue
        except SyntaxError:
            continue
        seen.add((module, code))
        yield Mutant(module, operator, occurrence, *_difference(sources[module], code), code)


def _difference(source: str, code: str) -> tuple[int, str, str]:
    """The first line that differs, and the lines of both that do."""
    before, after = source.splitlines(), code.splitlines()
    blocks = [b for b in difflib.SequenceMatcher(None, before, after, False).get_opcodes() if b[0] != "equal"]
    lost = [line.strip() for _, start, stop, _, _ in blocks for line in before[start:stop]]
    new = [line.strip() for _, _, _, start, stop in blocks for line in after[start:stop]]
    return blocks[0][1] + 1, " ".join(lost), " ".join(new)


def digest(root: Path, names: list[str]) -> str:
    """SHA-256 of these files."""
    whole = hashlib.sha256()
    for name in names:
        whole.update(hashlib.sha256((root / name).read_bytes()).digest())
    return whole.hexdigest()
