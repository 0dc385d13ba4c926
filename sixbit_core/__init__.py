"""The method: checkpoints, quantization, routing and caching. Knows torch and the kernels, no host."""

VERSION = "0.1.0"
