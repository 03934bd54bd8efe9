"""`noloco-node doctor`: what would keep this machine from taking part, said before it tries. Nobody is asked but peers.

`findings` (what is found, and how it is shown) · `computer` (this machine) · `desk` (what every node answers a doctor)
· `visit` (what peers say) · `command`.
"""
