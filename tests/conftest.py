"""What every test relies on."""

from __future__ import annotations

import signal

from hypothesis import settings

# A machine with other work to do is no reason for an example to fail, and the same code must pass or fail everywhere:
# examples follow from the test. `pytest --hypothesis-profile=random` looks for new ones.
settings.register_profile("random", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")

# A shell that runs the tests in the background lets them ignore Ctrl-C, and every process that they start inherits
# that: tests of Ctrl-C would then test nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
