"""What kernels queue for, as SimPy resources: each file holds one, with its requests and its sharing rule."""
