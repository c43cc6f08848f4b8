"""What everything else stands on: trees of tensors, seeds, losses, optimisers, errors."""
