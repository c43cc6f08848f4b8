"""The methods, one file a paper; importing this package imports none of them (the registry walks it when asked)."""
