"""`python -m benchmarks`: every measurement that can be run, with the first line of what it says about itself."""

import ast
from pathlib import Path


def commands() -> list[tuple[str, str]]:
    """Return each module of this package that runs as a program, and the first line of its docstring."""
    found = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        text = path.read_text()
        if path != Path(__file__) and 'if __name__ == "__main__":' in text:
            says = ast.get_docstring(ast.parse(text)) or ""
            found.append(
                (".".join(path.relative_to(Path(__file__).parents[1]).with_suffix("").parts), says.split("\n")[0])
            )
    return found


if __name__ == "__main__":
    print("Run one with `python -m NAME --help`; figures go into docs/results.md.\n")
    for name, says in commands():
        print(f"  {name}\n      {says}")
