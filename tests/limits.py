"""How long a test that waits for real processes waits at most."""

LAST_RESORT_S = 1800.0
"""Guards against waiting for ever, and nothing else: many times what the longest of these waits takes on a busy machine.
A test waits for the event itself; nothing is measured by this."""
