"""Ours and every rival's time for each primitive, held to what this machine can do."""
