"""`python -m benchmarks`: every measurement and every study that can be run, with the first line of its docstring."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands() -> list[tuple[str, str]]:
    """Return each module of `benchmarks` and `research` that runs as a program, and the first line of its docstring."""
    found = []
    for path in sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("research/**/*.py")]):
        text = path.read_text()
        if path != Path(__file__) and 'if __name__ == "__main__":' in text:
            says = ast.get_docstring(ast.parse(text)) or ""
            found.append((".".join(path.relative_to(ROOT).with_suffix("").parts), says.split("\n")[0]))
    return found


if __name__ == "__main__":
    print("Run one with `python -m NAME --help`; figures go into docs/results.md.\n")
    for name, says in commands():
        print(f"  {name}\n      {says}")
