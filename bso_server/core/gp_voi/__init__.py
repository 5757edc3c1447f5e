"""Policy `gp_voi`: a Gaussian process over batch sizes, and the value of information of each try."""
