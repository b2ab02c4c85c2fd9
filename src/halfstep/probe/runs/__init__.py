"""`halfstep compare`: the same script as it is and in FP32, update by update."""
