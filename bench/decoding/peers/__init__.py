"""Other engines beside ours: each a process of its own, in its own virtual environment."""
