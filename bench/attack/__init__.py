"""An attack suite: what outsiders, machines and members may try, on real hubs and real jobs."""
