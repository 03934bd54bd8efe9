"""Runs that have an owner: who may take part.

ticket           grants, tickets, credentials, lists of revocations, peer ids as public keys; no I/O
admission_state  what one peer knows of who may take part, and the ticket that it holds itself
admission_hook   lets members alone converse and publish, on any network
ticket_service   a signing peer gives and prolongs tickets
owner_files      what the owner keeps beside its run file
"""
