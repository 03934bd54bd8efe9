"""Messages for tests of conversations: a short one, and one with as many numbers as the test needs."""

from dataclasses import dataclass

from torch import Tensor

from noloco_node.network.schema import MessageSpec, Schema, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Ask:
    text: str


@dataclass(frozen=True, kw_only=True)
class Bulk:
    numbers: Tensor


ASKS = Schema({Ask: MessageSpec("Ask")})


def schema_of(numbers: int) -> Schema:
    """Return the schema of both, with so many numbers in a `Bulk`."""
    return Schema({Ask: MessageSpec("Ask"), Bulk: MessageSpec("Bulk", {"numbers": TensorSpec((numbers,), "float32")})})
