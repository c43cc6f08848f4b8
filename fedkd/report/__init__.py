"""Many runs in one table, and the pictures of a run."""
