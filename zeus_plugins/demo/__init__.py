"""A recurring training that finds its batch size on this machine: what ``zeus-plugins demo`` runs."""
