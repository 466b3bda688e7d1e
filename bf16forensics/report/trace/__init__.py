"""The report of trace-head: terminal, JSON, figure and export."""
