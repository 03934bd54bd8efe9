"""Who may take part in a run that has an owner: decided by signatures, with no server.

peer_keys         peer ids and the public keys that they are
ticket            grants signed in a chain from the owner to a peer: rights and expiry
revocation        the owner's signed list of whom it has shut out
admission_state   what one peer knows: who has shown which ticket, who is shut out
held_ticket       the ticket of one peer: chosen, renewed, and replaced where it is refused
refusals          how a refusal is said
admitted_network  a network that lets members in alone: conversations and records
proof_of_work     what a ticket costs where the run is open
ticket_service    a signing peer that gives tickets to whoever asks, within bounds
invite_credential what an invite holds to get in by
owner_files       the owner's key, and its own list of whom it let in
"""
