"""What a test expects where a person is told what is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from noloco_node.errors import Exit, UserError


@contextmanager
def user_error(code: Exit, match: str | None = None) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect an error for a person, with an exit code and, as `pytest.raises` has it, in words that match."""
    with pytest.raises(UserError, match=match) as caught:
        yield caught
    assert caught.value.code is code
