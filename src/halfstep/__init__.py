"""halfstep makes every optimizer update of a PyTorch run exactly the one its author meant."""
