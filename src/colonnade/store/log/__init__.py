"""Log on disk: the files of one table's rows on one rank. Format: ../format.md."""
