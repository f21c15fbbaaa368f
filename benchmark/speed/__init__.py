"""How fast our files are beside their peers, measured side by side: `python -m benchmark.speed`."""
