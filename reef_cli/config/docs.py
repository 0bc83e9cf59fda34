"""Documentation of settings read from the code: the string under each field of a settings dataclass.

One text serves `--help`, `recipe show`, the JSON schema and the editor; it cannot rot away from the field it stands under.
"""

import ast
import inspect
import textwrap
from functools import cache


@cache
def field_docs(owner: type) -> dict[str, str]:
    """Field name to its docstring, base classes included; empty where the source is not at hand."""
    docs: dict[str, str] = {}
    for cls in reversed(owner.__mro__[:-1]):
        docs |= _own_docs(cls)
    return docs


def summary(owner: type) -> str:
    """First paragraph of a class's docstring."""
    return " ".join((inspect.getdoc(owner) or "").split("\n\n")[0].split())


def _own_docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs
