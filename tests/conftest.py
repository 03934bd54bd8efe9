"""What every test relies on."""

from __future__ import annotations

import signal

# A shell that runs the tests in the background lets them ignore Ctrl-C, and every process that they start inherits
# that: tests of Ctrl-C would then test nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
