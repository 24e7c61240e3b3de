"""Layers of vLLM made fit for NPUs and for models that they were not written for."""
