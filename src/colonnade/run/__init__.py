"""From a configuration to a run: defaults, validation, planning, opening."""
