"""One system each, in its own process, run as `python -m workers.NAME`; `loop.py` is what they share."""
