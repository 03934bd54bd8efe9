"""docs/reference.md says what the code says."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_parts_are_those_of_the_code() -> None:
    script = ROOT / "docs" / "generate_reference.py"
    spec = importlib.util.spec_from_file_location("generate_reference", script)
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == module.generated(page), "run: python docs/generate_reference.py"
    assert all(f"<!-- generated: {name} -->" in page for name in module.GENERATORS)
