"""Who may take part in a run that has an owner: decided by signatures, with no server.

peer_keys         peer ids and the public keys that they are
ticket            what keys sign: tickets (grants from the owner to a peer), invites' credentials, lists of revocations
admission_state   what one peer knows: who has shown which ticket, who is shut out; how a refusal is said
held_ticket       the ticket of one peer: chosen, renewed, and replaced where it is refused
admission_hook    lets members alone converse and publish, on any network
ticket_service    a signing peer that gives tickets to whoever asks, within bounds; the work that an open run asks for
owner_files       the owner's key, and its own list of whom it let in
"""
