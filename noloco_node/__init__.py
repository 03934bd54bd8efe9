"""The shell of noloco_node: every effect, every configuration, and the command line."""

__version__ = "0.3.0"
