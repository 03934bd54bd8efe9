"""A whole swarm on one machine, for a person who wants to see it work.

    options          what is asked of a demo
    run              what happens in which order, from an empty directory to a summary
    outage           when one peer is killed and started again, and what came of it
    output_dir       the directory that a demo fills
    calibrate        how many inner steps fit into the time asked for
    child_processes  children that never outlive their parent
    child_main       the child's end of that promise
    swarm_processes  which children a whole swarm is
    evaluate_swarm   gather, merge, evaluate, export and sample, when the training is over
    summary          the numbers
    loss_plot        loss.png

What one sees meanwhile is drawn by `noloco_node.observe`. Nothing here takes part in the training: the demo starts
the same commands that a person would type, and reads the journals that they write anyway. It never loads torch.
"""
