"""Run the code cells of a notebook in one process, as Jupyter does: `python -m support.notebook FILE OUTPUTS`.

What the cells print to stdout and the value of a last expression are written to OUTPUTS as JSON, a list for each code
cell as a notebook's file has them. A figure of matplotlib is a PNG picture.
"""

import ast
import base64
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def sources(notebook: dict[str, Any]) -> list[str]:
    """The text of each code cell, in order."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shown(value: Any, count: int) -> dict[str, Any]:
    """The output of a cell that ends with this value."""
    data = {"text/plain": [repr(value) if not hasattr(value, "savefig") else "<Figure>"]}
    if hasattr(value, "savefig"):
        value.savefig(picture := io.BytesIO(), format="png", dpi=60, metadata={"Software": None})
        data["image/png"] = base64.b64encode(picture.getvalue()).decode()
    return {"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data}


def run(texts: list[str]) -> list[list[dict[str, Any]]]:
    """Run cells one after the other in one namespace; return the outputs of each."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for count, text in enumerate(texts, 1):
        *body, last = ast.parse(text).body
        value, printed, found = None, io.StringIO(), []
        with redirect_stdout(printed):
            if isinstance(last, ast.Expr):
                exec(compile(ast.Module(body, []), f"cell {count}", "exec"), names)
                value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
            else:
                exec(compile(ast.Module([*body, last], []), f"cell {count}", "exec"), names)
        if printed.getvalue():
            lines = printed.getvalue().splitlines(keepends=True)
            found.append({"output_type": "stream", "name": "stdout", "text": lines})
        outputs.append(found + ([shown(value, count)] if value is not None else []))
    return outputs


if __name__ == "__main__":
    file, written = (Path(word).resolve() for word in sys.argv[1:])  # cells may change the folder
    written.write_text(json.dumps(run(sources(json.loads(file.read_text(encoding="utf-8"))))), encoding="utf-8")
