"""The network of a peer over libp2p; implements `noloco_node.network.interface`.

network      one peer's network: opened, joined, conversations, records; one session after another
session      one daemon at work: connected, in the DHT, until it dies
again        when a daemon that died is started again
acquaintances  whom we met and where, to go back by
calls        streams by way of one daemon
switchboard  all streams of a peer: beats, answers, limits, counts
stream       one conversation over one socket
pulse        when a peer was last heard, and after which silence it is given up
control      the daemon's control protocol
delimited    its messages on the wire
daemon       the libp2p daemon as a watched child process
directory    where the sockets lie; those of the dead are swept away
settings     what a network needs to know, and the daemon's command line
scout        what is found out before the daemon starts: identity in use, who can dial us
dialback     asking others to dial us, and doing it for them
relays, told  relays beside a bootstrap peer, and how a swarm tells of them
parts        the parts of hivemind in use
records      records in hivemind's DHT
room         how much is kept for others there
signing      whose a record is
reach        dialling bootstrap addresses, and the words for what went wrong
addresses    multiaddrs as a person types them
identity     the key file that makes the peer id
"""
