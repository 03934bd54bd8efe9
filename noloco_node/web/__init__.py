"""What a swarm does as a page in a browser."""
