"""Runs a program as a person does, but as a member that stays on this machine and reads the roster every second.

python local_member.py PROGRAM ARGUMENT...
"""

import functools
import runpy
import sys

import noloco_node

if __name__ == "__main__":
    del sys.argv[0]
    near = functools.partial(noloco_node.GossipOptimizer, listen=["/ip4/127.0.0.1/tcp/0"], refresh=1.0)
    noloco_node.GossipOptimizer = near
    runpy.run_path(sys.argv[0], run_name="__main__")
