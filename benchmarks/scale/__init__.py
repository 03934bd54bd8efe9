"""What a swarm costs as it grows."""
