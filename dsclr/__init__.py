"""Memory-efficient contrastive training: streamed losses and GradCache steps under DeepSpeed."""

__version__ = "0.1.0"
