"""Runs: from a configuration to an open run, through defaults, validation, planning and opening."""
