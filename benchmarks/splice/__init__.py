"""What a splice costs, and how near its answers are to those of a full prefill."""
