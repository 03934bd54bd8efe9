"""Record anew what the tests of compatibility compare with: only where a format or a behaviour is meant to change.

    python tests/support/record_compatibility.py [EVENTS]

EVENTS is a directory for the whole events and reports of the simulations, of which digests are recorded: left there at
two commits, they show line by line what the digests say in one word. Look at all differences before they are committed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the explorer lies below tests

import torch
from compatibility.everything import record

if __name__ == "__main__":
    torch.set_num_threads(1)  # sums of several threads have another order
    whole = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if whole is not None:
        whole.mkdir(parents=True, exist_ok=True)
    record(whole)
