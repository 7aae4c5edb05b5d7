"""From a model's programs to kernels with costs on one machine."""
