"""Reports of training runs as HTML pages: one run, or several compared."""
