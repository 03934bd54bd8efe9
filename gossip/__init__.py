"""Gossip: two replicas of one stage draw together, with no all-reduce and no leader (NoLoCo, arXiv 2506.10911).

Knows neither the pipeline nor the shell nor the network library: whatever it needs of the outside is handed to it.
"""
