"""From the nodes of a layer to its kernels: lower -> shard -> rounds -> overlap -> stack -> kernels, each a function.

``lower`` spells out nodes that are several, ``shard`` puts in the collectives that the annotations ask for,
``rounds`` makes a gather of keys a ring's, ``overlap`` says what runs beside them, ``stack`` what a serving stack makes
of each node; ``workloads.families.nodes`` turns what is left into kernels. ``backward`` says what gradients need, and
weights in slices.
"""
