"""`noloco-node doctor`: what would keep this machine from joining, said before it tries."""
