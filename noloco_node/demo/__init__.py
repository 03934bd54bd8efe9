"""A whole swarm on one machine, for a person who wants to see it work.

    options          what is asked of a demo
    run              what happens in which order, from an empty directory to a summary
    output_dir       the directory that a demo fills
    calibrate        how many inner steps fit into the time asked for
    child_processes  children that never outlive their parent
    child_main       the child's end of that promise
    swarm_processes  which children a whole swarm is
    peer_history     one journal, folded event by event into what a person asks about
    live_view        the live picture, or plain lines; braille_chart: its curve
    evaluate_swarm   gather, merge, evaluate, export and sample, when the training is over
    summary          the numbers
    loss_plot        loss.png

Nothing here takes part in the training: the demo starts the same commands that a person would type, and reads the
journals that they write anyway. Its own process never loads torch.
"""
