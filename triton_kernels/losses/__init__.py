"""The policies in Triton, one file each, by the basenames of csrc/losses and of :mod:`pydml.policy`.

``term(k, u, row, col, …)`` is what a pair adds to slot k, ``slope`` its derivative by u; what follows are the fields of
the Python policy in their order. Slots are not repeated here: the launcher reads them off the Python policy.
"""
