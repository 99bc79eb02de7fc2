"""Tests here ask for plugins by name."""

from evenload.api import load_plugins

load_plugins()
