"""The network of a peer over libp2p; implements `noloco_node.network.interface`.

network          one peer's network: opened, joined, conversations, records; one session after another
session          one daemon at work: connected, in the DHT, until it dies
preflight        what is found out before the daemon starts: identity in use, who can dial us
relays           relays that run beside a bootstrap peer
hivemind_compat  everything that we know of hivemind's insides
streams/         conversations: their rules without I/O, on a socket, dialled and answered
dht/             records in hivemind's DHT: signed, bounded
daemon/          the libp2p daemon as a watched child process, and its control protocol
endpoint/        settings, addresses, the key that makes the peer id, whom we met
"""
