"""What the documents claim of the program and of each other can be looked up."""

import ast
import asyncio
import re
from itertools import chain
from pathlib import Path

import pytest

from docs import one_step

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("research/*.md"), *ROOT.glob("docker/*.md")])


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_the_site_has_every_page() -> None:
    """Else `make docs` fails."""
    index = ROOT / "docs/index.md"
    listed = re.findall(r"^(?:\.\./)?[\w/-]+$", index.read_text(encoding="utf-8"), re.MULTILINE)
    found = [(index.parent / name).resolve().with_suffix(".md") for name in listed]
    assert sorted([*found, index]) == PAGES


def said() -> str:
    """Return every text in the product's source, one a line, with `…` for what an f-string fills in."""
    lines = []
    for path in chain.from_iterable(
        (ROOT / package).rglob("*.py") for package in ("gossip", "noloco_node", "pipeline")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                lines.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
    return "\n".join(lines) + (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_messages_that_troubleshooting_quotes_exist() -> None:
    page = " ".join((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").split())
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", page) + re.findall(r"\| `([^`]+)` \|", page)
    texts = said()
    assert len(quoted) > 50
    missing = [
        quote for quote in quoted if any(part.strip() and part.strip() not in texts for part in quote.split("…"))
    ]
    assert missing == []


def test_the_step_on_one_page_trains_and_gossips() -> None:
    losses, met = asyncio.run(one_step.main())
    assert losses[-1] < 0.5 * losses[0]
    assert met >= one_step.STAGES * one_step.REPLICAS


def test_the_glossary_has_fifty_terms_that_are_used() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    terms = [row for row in rows if row not in ("term", "---")]
    assert len(terms) <= 50
    places = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *(ROOT / "noloco_node").rglob("*.py")]
    text = " ".join(" ".join(path.read_text().lower().split()) for path in places if path.name != "glossary.md")
    words = [word for term in terms for word in term.partition(" (")[0].split(", ")]
    assert not [word for word in words if word not in text]
