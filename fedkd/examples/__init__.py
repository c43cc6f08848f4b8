"""Small examples that papers illustrate themselves with, run by `fedkd +experiment=...`."""
