"""The network of a peer over libp2p; implements `noloco_node.port`.

network      one peer's network: opened, joined, conversations, records
switchboard  all streams of a peer: beats, answers, limits, counts
stream       one conversation over one socket
control      the daemon's control protocol
daemon       the libp2p daemon as a watched child process
records      records in hivemind's DHT
reach        dialling bootstrap addresses, and the words for what went wrong
addresses    multiaddrs as a person types them
identity     the key file that makes the peer id
"""
