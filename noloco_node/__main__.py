"""`python -m noloco_node`: the same as the command `noloco-node`."""

from noloco_node.cli.main import main

main()
