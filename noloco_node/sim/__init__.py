"""The same swarm under another event loop: virtual time instead of the wall clock."""
