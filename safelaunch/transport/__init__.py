"""Ways to run our programs on the nodes; `base` is the protocol."""
