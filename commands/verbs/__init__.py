"""Verbs as the command line takes them. All are imported for --help: what takes long to import is imported inside."""
