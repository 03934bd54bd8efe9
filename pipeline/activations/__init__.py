"""How activations and their gradients travel between stages.

formats    the codecs' names, and how many bytes each takes
codec      the arithmetic: values to bytes, and back
influence  how much of a message counts, by its size
subspace   fewer values: what travels where layers write into some of the channels alone
"""
