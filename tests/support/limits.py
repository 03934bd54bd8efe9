"""How long a test that waits for real processes and lines waits at most."""

from noloco_node.libp2p.settings import TimeoutSettings

LAST_RESORT_S = 1800.0
"""Guards against waiting for ever, and nothing else: many times what the longest of these waits takes on a busy
machine. A test waits for the event itself; nothing is measured by this."""

PATIENT = TimeoutSettings(
    silence_s=LAST_RESORT_S,
    least_silence_s=LAST_RESORT_S,
    most_silence_s=LAST_RESORT_S,
    stall_s=LAST_RESORT_S,
    most_stall_s=LAST_RESORT_S,
    linger_s=LAST_RESORT_S,
    open_s=LAST_RESORT_S,
    return_s=LAST_RESORT_S,
    reach_s=LAST_RESORT_S,
    dht_s=LAST_RESORT_S,
    start_s=LAST_RESORT_S,
)
"""Of a peer whose every failure is told by an event: what fails all the same did not fail by a deadline."""
RECORD_S = 600.0
"""Lifetime of a record that is not to expire while a test looks at it."""
