"""Programs that run on the nodes: stdlib only, Python 3.8, sent as text; they import nothing of ours."""
