"""FedP3 and LDP-FedP3: the tables of Chapter 4."""
