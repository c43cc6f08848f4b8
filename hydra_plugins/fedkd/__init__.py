"""What Hydra finds of fedkd by itself; its plugins must lie in this namespace."""
