"""The notebook of the examples: its cells, one after the other, with a real node and a real bootstrap peer."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from process_swarm import LOCAL, host
from processes import Commands

import noloco_node

NOTEBOOK = Path(__file__).parents[2] / "examples" / "join_and_watch.ipynb"
SIZES = {"vocab_size": 384, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.network
def test_its_cells_join_watch_plot_and_leave(tmp_path: Path) -> None:
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    mpl.use("agg")
    with Commands() as commands:
        model = {"architecture": "llama", "sizes": SIZES | {"intermediate_size": 32, "max_position_embeddings": 32}}
        one = {"pipeline": {"stages": 1, "microbatches_per_step": 2}}
        run = noloco_node.init(
            commands.directory / "run.toml", model, steps=100_000, replicas=1, batch=2, sequence_length=32, sections=one
        )
        _, invite = host(commands, run)
        names: dict[str, Any] = {}
        exec(cells[0], names)
        own = {"home": tmp_path / "node", "device": "cpu", "threads": 1, "listen": [LOCAL], "refresh": 0.5}
        own["slowdown"] = 10.0
        names |= {"invite": invite, "looks": 3, "options": own}
        for cell in cells[1:]:
            exec(cell, names)
    assert names["peer"].state == "left"
    assert len(names["history"]) == 3
    assert len(names["figure"].axes) == 2
