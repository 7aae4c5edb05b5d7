"""From a model, GPUs and targets to ranked deployments: ``wattline plan``."""
