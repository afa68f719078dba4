"""Checkpoints of a run: what a rank's state is, when a checkpoint of all ranks is complete, how it is read again."""
