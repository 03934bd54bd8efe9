"""The pipeline: from tokens to gradients through random replicas of each stage.

Knows neither gossip nor the shell nor the network library: whatever it needs of the outside is handed to it as a
callable."""
