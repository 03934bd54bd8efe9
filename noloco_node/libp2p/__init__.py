"""The network of a peer over libp2p; implements `noloco_node.network.interface`.

network          one peer's network: opened, joined, conversations, records; one daemon after another
reachability     what is found out before the daemon starts: identity in use, who can dial us
relays           relays that run beside a bootstrap peer
switchboard      all streams of a peer: answered, bounded, counted
stream           one conversation: its rules without I/O, and its socket
dht_records      our node of hivemind's DHT, and what we publish and read there
record_checks    which records of others are believed and kept
daemon           the libp2p daemon as a child process
control          what we ask the daemon, and the streams that it opens and accepts
addresses        multiaddrs: checked, remembered, why they fail
settings         what a network is opened with: settings, the identity's key, the run's secret
hivemind_compat  everything that we know of hivemind's insides
call_rules       which calls in the DHT are answered, and what goes along with them
record_holders   which nodes of the DHT are near a place, and which of them to ask
short_answers    answers to readings without what the reader has
"""
