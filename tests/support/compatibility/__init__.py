"""What must stay as it is however the code is arranged: bytes on the wire, files on disks, names, and what swarms do.

Peers of other versions take part in the same run, and homes outlive the program that wrote them. So `data` keeps what
the product wrote when it was recorded, and `test_compatibility.py` compares what it writes now, byte by byte where
bytes matter, and reads what was written then. Of simulations it keeps digests of all that happened: a change of code
that is meant to change nothing changes none of them.

Where a change is intended (a format of another version, another rule, another default), record anew and look at what
differs before it is committed:

    python tests/support/record_compatibility.py [EVENTS]

Where a digest of a simulation is wrong, record to a directory EVENTS at both commits and compare the two: it gets the
whole events and figures, as the digests see them.

`product.py` has all imports of the product under names of its own, and nothing recorded depends on a name in Python:
who renames or moves something changes that module alone.
"""
