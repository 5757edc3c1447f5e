"""Policy `gp_voi`: laws of training, Gaussian processes for their residuals, the value of trials."""
