"""From the nodes of a layer to its kernels: lower -> shard -> overlap -> stack -> kernels, each a function.

``lower`` spells out nodes that are several, ``shard`` puts in the collectives that the annotations ask for,
``overlap`` says what runs beside them, ``stack`` what a serving stack makes of each node; ``workloads.families.nodes``
turns what is left into kernels.
"""
