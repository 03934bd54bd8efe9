"""Bytes on the wire, files on disks, names and the behaviour of swarms, which must stay however the code is arranged.

Peers of other versions take part in the same run, and homes outlive the program that wrote them. So `data` keeps what
the product wrote when it was recorded; `test_compatibility.py` compares what it writes now, and reads what it wrote
then. Where a change is intended, record anew and look at the differences before they are committed:

    python tests/support/record_compatibility.py [EVENTS]

Where a digest of a simulation is wrong, record to a directory EVENTS at both commits and compare the two: it gets the
whole events and figures, as the digests see them.

`product.py` has all imports of the product under names of its own, and nothing recorded depends on a name in Python:
who renames or moves something changes that module alone.
"""
