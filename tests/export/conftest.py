"""What the tests of exports share."""

from collections.abc import Iterator

import pytest

from noloco_node.data import held_out_text
from noloco_node.export import held_out_loss


@pytest.fixture(scope="package")
def short_text() -> Iterator[None]:
    """Let replicas be judged by a little text, of which little more is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out_loss, "JUDGED_TOKENS", 1024)
        patch.setattr(held_out_text, "READ_TOKENS", 2**14)
        yield
