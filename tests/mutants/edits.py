"""Mutants of a source file: edits of one line that change what the code does.

An edit is made on the text, not on the tree, so that every other byte of the file stays. Text that
a reader sees and the program does not use is left alone: docstrings, annotations, decorators,
imports, f-strings, the arguments of `raise` and of calls that print or log.
"""

import ast
import re
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*", "/"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
MESSAGES = {"print", "warn", "warning", "info", "debug", "rank_zero_info", "rank_zero_warn"}


@dataclass(frozen=True)
class Edit:
    """Replacement of source[start:end], both within one line.

    Attributes:
        operator: Kind of the change.
        start: Offset of the first replaced character.
        end: Offset behind the last replaced character.
        text: Replacement.
    """

    operator: str
    start: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


class Sites(ast.NodeVisitor):
    """Places of a file that can be mutated, each with its possible edits.

    Args:
        source: Python code.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[list[Edit]] = []
        lines = source.splitlines(keepends=True)
        self._lines = lines
        self._begins = [0]
        for line in lines:
            self._begins.append(self._begins[-1] + len(line))
        self.visit(ast.parse(source))

    # ---- places ----------------------------------------------------------------------------------

    def _offset(self, line: int, column: int) -> int:
        """Offset in characters; Python counts columns in bytes."""
        text = self._lines[line - 1].encode()[:column].decode()
        return self._begins[line - 1] + len(text)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt | ast.arg | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._offset(node.lineno, node.col_offset)
        return begin, self._offset(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.AST) -> str:
        begin, end = self._span(node)
        return self.source[begin:end]

    def _add(self, operator: str, begin: int, end: int, *texts: str) -> None:
        if "\n" not in self.source[begin:end]:
            self.found.append([Edit(operator, begin, end, text) for text in texts])

    def _between(self, operator: str, left: ast.AST, right: ast.AST, sign: str, *to: str) -> None:
        """Replaces the sign between two operands."""
        begin = self._span(left)[1]
        end = self._span(right)[0]
        gap = self.source[begin:end]
        pattern = sign if sign[0].isalpha() else re.escape(sign)
        match = re.search(pattern, gap)
        if match and "#" not in gap:
            self._add(operator, begin + match.start(), begin + match.end(), *to)

    def _negated(self, test: ast.expr) -> None:
        begin, end = self._span(test)
        self._add("negated condition", begin, end, f"(not ({self.source[begin:end]}))")

    # ---- what is left alone ----------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self.visit_ClassDef(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Import(self, node: ast.AST) -> None:
        pass

    visit_ImportFrom = visit_JoinedStr = visit_Import

    # ---- statements ------------------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> None:
        if self._text(node.test) in ("TYPE_CHECKING", '__name__ == "__main__"'):
            return
        self._negated(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negated(node.test)
        self.generic_visit(node)

    def _deleted(self, node: ast.stmt) -> None:
        self._add("deleted statement", *self._span(node), "pass")

    visit_Raise = visit_Delete = _deleted

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring, or ...
        self._deleted(node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            self._deleted(node)
        if not (isinstance(node.targets[0], ast.Name) and node.targets[0].id.startswith("__")):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._deleted(node)
        if type(node.op) in ARITHMETIC:
            sign, *others = ARITHMETIC[type(node.op)]
            to = [f"{other}=" for other in others]
            self._between("arithmetic", node.target, node.value, f"{sign}=", *to)
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("break and continue", *self._span(node), "break", "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add("break and continue", *self._span(node), "continue", "pass")

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if value is None:
            self._deleted(node)
        elif not (isinstance(value, ast.Constant) and value.value is None):
            self._add("return None", *self._span(value), "None")
        self.generic_visit(node)

    # ---- expressions -----------------------------------------------------------------------------

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negated(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negated(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands[:-1], node.ops, operands[1:], strict=True):
            self._between("comparison", left, right, *COMPARISONS[type(op)])
            self._key(right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        sign, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values[:-1], node.values[1:], strict=True):
            self._between("and, or", left, right, sign, other)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        begin, _ = self._span(node)
        if isinstance(node.op, ast.Not):
            self._add("not", begin, begin + len("not"), "")
        elif isinstance(node.op, ast.USub):
            self._add("arithmetic", begin, begin + 1, "")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
            sign, *others = ARITHMETIC[type(node.op)]
            self._between("arithmetic", node.left, node.right, sign, *others)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "Literal":
            return
        self._key(node.slice)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            if key is not None:
                self._key(key)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add("True and False", *self._span(node), str(not value))
        elif isinstance(value, int | float):
            others = {value + 1, value * 10, type(value)(0)} - {value}
            self._add("constant", *self._span(node), *sorted(map(repr, others)))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        if name in NAMES:
            end = self._span(node.func)[1]
            self._add("min and max, any and all", end - len(name), end, NAMES[name])
        if name in MESSAGES:
            return
        self._swapped(node)
        self.generic_visit(node)

    def _swapped(self, node: ast.Call) -> None:
        if len(node.args) < 2 or _is_check(node.func):
            return
        if not all(isinstance(a, ast.Name | ast.Attribute | ast.Subscript) for a in node.args[:2]):
            return
        first, second = (self._text(a) for a in node.args[:2])
        (begin, middle), (between, end) = map(self._span, node.args[:2])
        if first != second and "#" not in self.source[middle:between]:
            swapped = f"{second}{self.source[middle:between]}{first}"
            self._add("swapped arguments", begin, end, swapped)

    def _key(self, node: ast.expr) -> None:
        """A key or name in quotes, which the code looks up or compares."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            begin, end = self._span(node)
            self._add("key", begin, end, self.source[begin : end - 1] + "X" + self.source[end - 1])


def _is_text(node: ast.expr) -> bool:
    literal = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return literal or isinstance(node, ast.JoinedStr)


def _is_check(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in ("isinstance", "issubclass")
