"""The floor plan of the product, held as data: which way imports go, how large packages are, and how things are named.

A rule returns what breaks it. What may break it for a reason stands in EXCEPTIONS; an exception that nothing needs any
more fails as well, so these lists only get shorter.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest
from limits import LAST_RESORT_S

from benchmarks.structure.figures import repeated_classes
from benchmarks.structure.source import ROOT, circles, package_circles, part_of, read_tree, unit

SOURCE = read_tree()

# From low to high: who stands further right may import who stands further left, and those between two bars know
# nothing of each other. Every part has its place here.
TOP_ORDER = """
    noloco_node | errors units tasks terminal charts | gossip pipeline network | storage | admission | libp2p run |
    journal limits data | machine swarm | planning state_sync observe evaluation | web | node export doctor |
    inference sim | demo | cli | api | __main__
"""
INNER_ORDERS = {
    "gossip": "rule settings | interface | exchange | rounds transfer",
    "noloco_node.libp2p": """
        addresses settings short_answers | record_holders | call_rules | hivemind_compat | daemon stream record_checks |
        switchboard | control | dht_records | relays reachability | network
    """,
    "noloco_node.sim": "clock hardware network | scenario | peer | fault_injection | world | report",
}
MOST_FILES = 15
LONE_MODULES = 5
VAGUE = "common handler helper helpers info manager master misc rank util utils"
APART = ("benchmarks", "explorer", "research", "support", "system")
"""Folders of tests that are no package's."""

Broken = dict[str, str]
"""What breaks a rule, by the name under which it may be excepted, with the rest that a person needs to know."""


def arrows_follow_the_order() -> Broken:
    broken: Broken = {}
    for package, text in {"": TOP_ORDER, **INNER_ORDERS}.items():
        part = part_of(package) if package else unit
        height = {name: number for number, group in enumerate(text.split("|")) for name in group.split()}
        parts = {found for name in SOURCE.modules if (found := part(name)) is not None}
        broken |= {f"{package}.{name}".strip("."): "in no order" for name in parts - height.keys()}
        broken |= {f"{package}.{name}".strip("."): "in the order, not in the tree" for name in height.keys() - parts}
        for name, targets in SOURCE.graph.items():
            for target in targets:
                here, there = part(name), part(target)
                if here in height and there in height and here != there and height[here] <= height[there]:
                    broken[f"{name} -> {target}"] = f"{there} does not stand below {here}"
    return broken


def no_circle() -> Broken:
    groups = [*circles(SOURCE.graph), *package_circles(SOURCE)]
    return {" ".join(group): "each imports each, over some way" for group in groups}


def packages_are_small() -> Broken:
    files = Counter(module.package for module in SOURCE.modules.values() if not module.is_package)
    broken = {name: f"{count} files" for name, count in files.items() if count > MOST_FILES}
    lone = files["noloco_node"] - ("noloco_node.__main__" in SOURCE.modules)
    return broken | ({"noloco_node": f"{lone} lone modules"} if lone > LONE_MODULES else {})


def a_package_says_at_most_what_it_is() -> Broken:
    """Code in `__init__.py` would run for whoever needs one module, and load torch into commands that live without."""
    code = {name: SOURCE.modules[name].tree.body for name in SOURCE.packages}
    code = {name: body[1:] if ast.get_docstring(SOURCE.modules[name].tree) else body for name, body in code.items()}
    return {name: ast.unparse(body[0]) for name, body in code.items() if body}


def public_classes_have_names_of_their_own() -> Broken:
    return {name: " ".join(places) for name, places in repeated_classes(SOURCE).items()}


def module_names_are_nouns() -> Broken:
    """The last word says what a module is; what ends like a participle has to be a noun of the field."""
    lasts = {name: name.split(".")[-1].split("_")[-1] for name in SOURCE.modules}
    return {last: name for name, last in lasts.items() if last.endswith(("ing", "ed"))}


def module_names_are_not_vague() -> Broken:
    words = {name: set(name.split(".")[-1].split("_")) for name in SOURCE.modules}
    return {name: " ".join(found) for name, all_words in words.items() if (found := all_words & {*VAGUE.split()})}


def folders_of_tests_are_those_of_packages() -> Broken:
    tests = ROOT / "tests"
    files = [path.relative_to(tests).parts for path in tests.rglob("*.py")]
    folders = {".".join(parts[:-1]) for parts in files if parts[0] not in APART}
    of_modules = {f"test_{name.split('.')[1]}.py" for name in SOURCE.modules if name.count(".") == 1}
    top = {parts[0] for parts in files if len(parts) == 1} - {"conftest.py", "test_architecture.py"} - of_modules
    tested = {name.removeprefix("noloco_node.") for name in SOURCE.packages if name != "noloco_node"}
    untested = {name for name in tested if "." not in name} - {name.split(".")[0] for name in folders}
    return (
        {f"tests/{name}": "lies outside the packages" for name in top}
        | dict.fromkeys(folders - tested - {""}, "has tests and is no package")
        | dict.fromkeys(untested, "has no tests")
    )


RULES: tuple[Callable[[], Broken], ...] = (
    arrows_follow_the_order,
    no_circle,
    packages_are_small,
    a_package_says_at_most_what_it_is,
    public_classes_have_names_of_their_own,
    module_names_are_nouns,
    module_names_are_not_vague,
    folders_of_tests_are_those_of_packages,
)
EXCEPTIONS: dict[Callable[[], Broken], dict[str, str]] = {
    a_package_says_at_most_what_it_is: {"noloco_node": "setup.cfg reads the version there"},
    public_classes_have_names_of_their_own: {
        "Conversation": "gossip says what it needs of a conversation, and does not know the network's interface"
    },
    module_names_are_nouns: {
        "encoding": "of text into tokens",
        "matching": "a set of pairs, as in graph theory",
        "meeting": "an exchange between two replicas: the paper's and the glossary's word",
        "planning": "of memory and bandwidth before a run",
        "reporting": "of progress, as an activity of the node",
        "routing": "of microbatches",
    },
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: Callable[[], Broken]) -> None:
    broken = rule()
    left = [f"{name}: {broken[name]}" for name in sorted(broken.keys() - EXCEPTIONS.get(rule, {}).keys())]
    assert not left, "\n".join(left)


@pytest.mark.parametrize("rule", EXCEPTIONS)
def test_every_exception_is_needed(rule: Callable[[], Broken]) -> None:
    needless = sorted(EXCEPTIONS[rule].keys() - rule().keys())
    assert not needless, "\n".join(needless)


def imported(name: str) -> set[str]:
    return {found.target for found in SOURCE.imports[name]}


def importers(library: str) -> set[str]:
    return {name for name in SOURCE.modules if library in {target.split(".")[0] for target in imported(name)}}


@pytest.mark.parametrize("package", ["gossip", "pipeline"])
def test_siblings_know_neither_each_other_nor_the_shell(package: str) -> None:
    allowed = {"torch", package} | sys.stdlib_module_names
    of_models = {"pipeline.partition": {"transformers"}, "pipeline.model_config": {"transformers", "huggingface_hub"}}
    for name in SOURCE.modules:
        if name.split(".")[0] == package:
            extra = of_models.get(name, set())
            foreign = {target.split(".")[0] for target in imported(name)} - allowed - extra
            assert not foreign, f"{name} imports {foreign}"


def test_one_module_imports_hivemind() -> None:
    assert importers("hivemind") == {"noloco_node.libp2p.hivemind_compat"}


def test_one_module_imports_uvloop() -> None:
    assert importers("uvloop") == {"noloco_node.machine.signals"}


def test_no_collective_anywhere() -> None:
    assert not {name for name, module in SOURCE.modules.items() if "torch.distributed" in module.text}
    assert not {name for name in SOURCE.modules if any(i.startswith("torch.distributed") for i in imported(name))}


def test_production_does_not_know_the_simulator() -> None:
    knows = {unit(name) for name in SOURCE.modules if any(unit(target) == "sim" for target in SOURCE.graph[name])}
    assert knows <= {"sim", "cli"}


def test_a_bootstrap_peer_and_the_command_line_do_not_load_torch() -> None:
    """In a process of its own: this one has loaded torch long ago."""
    program = (
        "import sys, noloco_node.cli.main, noloco_node.cli.bootstrap, noloco_node.libp2p.network\n"
        "import noloco_node.journal.reader, noloco_node.journal.writer\n"
        "noloco_node.libp2p.hivemind_compat.load_hivemind()\n"
        "heavy = {'torch', 'transformers', 'scipy', 'pandas', 'matplotlib', 'datasets'} & sys.modules.keys()\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LAST_RESORT_S, check=False
    )
    assert done.returncode == 0, done.stderr
