"""The network of a peer over libp2p; implements `noloco_node.network.interface`.

network          one peer's network: opened, joined, conversations, records; one session after another
session          one daemon at work: connected, in the DHT, until it dies
reachability     what is found out before the daemon starts: identity in use, who can dial us
relays           relays that run beside a bootstrap peer
switchboard      conversations: opened and accepted by way of a daemon, answered
stream           one conversation on a socket
frame_protocol   the rules of a conversation, without I/O
dht_records      our node of hivemind's DHT, and what we publish and read there
record_checks    which records of others are believed and kept
daemon, control  the libp2p daemon as a child process, and what we ask it
addresses        multiaddrs: checked, remembered, why they fail
settings         what a network is opened with: settings, the identity's key, the run's secret
hivemind_compat  everything that we know of hivemind's insides
"""
