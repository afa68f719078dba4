"""Files that survive a crash when written, and that nobody trusts when read."""
