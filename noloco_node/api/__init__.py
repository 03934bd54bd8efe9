"""The Python interface: the six names of `noloco_node` (docs/python.md)."""
