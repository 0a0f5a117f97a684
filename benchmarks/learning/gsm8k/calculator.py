"""The tool of the report on GSM8K with a calculator."""

import ast
import operator
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, parentheses and + - * /, as 3 * (12 - 4).
    """
    number = value(ast.parse(expression.replace(",", "").strip(), mode="eval").body)
    return str(number) if number.denominator == 1 else f"{float(number):.6g}"


def value(node: ast.expr) -> Fraction:
    """Return the number of an expression. Raises ValueError for anything else than the above."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return Fraction(OPERATORS[type(node.op)](value(node.left), value(node.right)))
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")
