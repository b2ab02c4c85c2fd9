"""`halfstep.compare`: one micro-batch both ways, module by module, and remedies tried on it."""
