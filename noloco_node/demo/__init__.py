"""A whole swarm on one machine, for a person who wants to see it work.

    order      what is asked of a demo
    run        what happens in which order, from an empty directory to a summary
    calibrate  how many inner steps fit into the time asked for
    processes  children that never outlive their parent
    leash      the child's end of that promise
    track      one journal, folded event by event into what a person asks about
    view       the live picture, or plain lines
    verdict    gather, merge, evaluate, export and sample, when the training is over
    summary    the numbers
    plot       loss.png

Nothing here takes part in the training: the demo starts the same commands that a person would type, and reads the
journals that they write anyway. Its own process never loads torch.
"""
