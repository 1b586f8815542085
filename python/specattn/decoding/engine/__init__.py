"""The decode loop, the contract of methods, and the public `Target`."""
