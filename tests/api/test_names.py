"""Six names are importable, and cost nothing before they are asked for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import LAST_RESORT_S

import noloco_node


def test_the_names_are_there_and_no_others() -> None:
    from noloco_node.api import gossip_optimizer, peer, run_files, swarm, trainer_callback

    assert noloco_node.init is run_files.init
    assert noloco_node.join is peer.join
    assert noloco_node.Swarm is swarm.Swarm
    assert noloco_node.export is swarm.export
    assert noloco_node.GossipOptimizer is gossip_optimizer.GossipOptimizer
    assert noloco_node.GossipCallback is trainer_callback.GossipCallback
    names = {"init", "join", "Swarm", "export", "GossipOptimizer", "GossipCallback"}
    assert names <= set(dir(noloco_node))
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) - {"finished"} == names
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = noloco_node.nothing


def test_the_import_loads_nothing_and_a_package_hides_no_name() -> None:
    """In a process of its own: this one has loaded torch long ago."""
    program = (
        "import sys, noloco_node\n"
        "heavy = {'torch', 'asyncio', 'msgspec', 'noloco_node.api'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "import noloco_node.export.sources\n"
        "assert callable(noloco_node.export)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LAST_RESORT_S, check=False
    )
    assert done.returncode == 0, done.stderr
