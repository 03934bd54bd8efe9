"""`noloco-node join`: checks what was typed before torch is loaded, then has `participant` take part."""

from __future__ import annotations

import gc

from noloco_node.cli.event_loop import run
from noloco_node.cli.options import JoinOptions, KeptInviteArgument, default_home, page_place, taking
from noloco_node.data.dataset_documents import check_source
from noloco_node.libp2p.addresses import check_announce, check_listen
from noloco_node.swarm.invite import found, parse
from noloco_node.swarm.roster import checked_name
from noloco_node.terminal import say
from noloco_node.web.places import metrics_place


@taking(JoinOptions)
def join(options: JoinOptions, invite: KeptInviteArgument = None) -> None:
    """Join a swarm: take a stage and train with the others to the end. Ctrl-C once leaves politely, twice at once."""
    # Before torch is loaded: a refusal is to come at once.
    _ = options.allowance, options.most_memory_bytes, options.most_disk_bytes
    _ = metrics_place(options.metrics, is_open=options.metrics_open)
    _ = page_place(options.web, is_open=options.web_open), checked_name(options.name)
    parsed = parse(found(invite, options.home or default_home("node")))
    check_listen(options.listen or ())
    check_announce(options.announce or ())
    if options.data is not None:
        check_source(options.data)
    say("loading torch (a few seconds)")
    gc.disable()  # none of what is imported is garbage, and to look for some takes a sixth of a node's start
    try:
        from noloco_node.cli.participant import take_part
    finally:
        gc.freeze()
        gc.enable()
    run(take_part(parsed, options))
