"""`noloco-node doctor`: what would keep this machine from taking part, said before it tries. Nobody is asked but peers.

`findings` (what is found, and how it is shown) · `machine_checks` (this machine) · `swarm_checks` (what peers say) ·
`command`.
"""
