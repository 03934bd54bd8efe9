"""The pipeline: from tokens to gradients through random replicas of each stage.

This package knows neither gossip nor the shell nor the network library: they hand callables to it."""
