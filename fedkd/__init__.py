"""fedkd: personalised federated learning with knowledge distillation, simulated."""

__version__ = "0.1.0"
