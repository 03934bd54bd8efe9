"""A whole swarm on one machine: it starts the commands that a person would type, and reads their journals."""
