"""Training: corpus, packing, MuonH with HyperP transfer, single runs and iso-FLOPs grids."""
