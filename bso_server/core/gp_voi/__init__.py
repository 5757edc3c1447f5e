"""Policy `gp_voi`: laws of training, Gaussian processes for what they leave, the value of tries."""
