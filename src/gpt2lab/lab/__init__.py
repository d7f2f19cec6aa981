"""Experiments on runs: comparison over seeds, ablations, ladders, replay, causes of spikes and differences."""
