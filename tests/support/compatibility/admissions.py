"""What the owner of a run, its delegates and its members sign, and the files that the owner keeps."""

from pathlib import Path
from typing import Any

from compatibility import product
from compatibility.agreements import peer_id
from compatibility.files import recipe
from compatibility.recorded import RECORDED

UNTIL = 1_800_000_000
EARLIER = UNTIL - 86_400
OWNER, DELEGATE, ONCE = (product.Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))
"""Keys of the owner, of a delegate that signs for others, and of a single-use invite."""
OTHER = bytes([7]) * 32
"""A key that is shut out."""


def public(key: Any) -> bytes:
    """Return the public half of a key."""
    found: bytes = key.public_key().public_bytes_raw()
    return found


def member() -> bytes:
    """Return the public key of the peer whose home is recorded."""
    return (RECORDED / "home" / "identity.key").read_bytes()[-32:]


def chains() -> dict[str, Any]:
    """Return a ticket of each form."""
    ticket, right, run = product.ticket, product.ticket.Right, recipe().digest
    trains = ticket.MEMBER
    signs = ticket.grant(OWNER, run, trains | right.SIGN, UNTIL, public(DELEGATE))
    once = ticket.grant(OWNER, run, trains | right.ONCE, UNTIL, public(ONCE))
    return {
        "by the owner": (ticket.grant(OWNER, run, trains, UNTIL, member()),),
        "by a delegate": ticket.extended((signs,), DELEGATE, run, trains, EARLIER, member()),
        "by a single-use invite": ticket.extended((once,), ONCE, run, trains, EARLIER, member()),
        "to look": ticket.extended((signs,), DELEGATE, run, right.LOOK, EARLIER, member()),
    }


def credentials() -> dict[str, Any]:
    """Return what may stand behind the # of an invite."""
    given = product.ticket.InviteCredential
    single_use = given(chains()["by a single-use invite"][:1], ONCE.private_bytes_raw())
    return {"open": given(), "for a peer": given(chains()["by the owner"]), "single-use": single_use}


def lists() -> dict[str, Any]:
    """Return what an owner keeps: of peers that were let in, then with two shut out, then with one of them let back."""
    files, run = product.owner_files, recipe().digest
    entries = (
        files.IssuedEntry(key=member().hex(), kind=files.TICKET, until=UNTIL, note="Ada", may_sign=True),
        files.IssuedEntry(key=public(ONCE).hex(), kind="single-use invite", until=EARLIER),
    )
    let_in = files.MemberList(issued=entries)
    both = {member().hex(): UNTIL, OTHER.hex(): EARLIER}
    shut_out = files.with_revoked(let_in, OWNER, run, both, EARLIER - 1.0)
    lifted = files.with_revoked(shut_out, OWNER, run, {member().hex(): 0}, EARLIER - 1.0)
    return {"let in": let_in, "shut out": shut_out, "let back": lifted}


def recorded(directory: Path) -> dict[str, Any]:
    """Return all of it. `directory`: for the files that are written."""
    run, members = directory / "run.toml", dict[str, str]()
    product.owner_files.save_key(run, OWNER)
    for name, each in lists().items():
        product.owner_files.save_members(run, each)
        members[name] = (directory / "run.members").read_text()
    return {
        "owner": public(OWNER).hex(),
        "run.owner": (directory / "run.owner").read_text(),
        "peer": peer_id(member()),
        "tickets": {name: product.ticket.encode(each).hex() for name, each in chains().items()},
        "credentials": {name: str(each) for name, each in credentials().items()},
        "run.members": members,
    }
