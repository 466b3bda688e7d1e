"""One thin module a command: parse, call, choose a renderer."""
