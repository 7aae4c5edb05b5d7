"""The measuring suite that runs on real NVIDIA GPUs and writes records that profiles are fitted from.

``plan`` lists what to measure (pure data), ``cases`` and ``steps`` turn one planned row into work on a GPU,
``timing`` brings that work to a steady state and reads time, energy and clock, ``run`` drives it all and
resumes. PyTorch (and Triton, which comes with it) are needed only when measuring, never to read a plan.
"""
