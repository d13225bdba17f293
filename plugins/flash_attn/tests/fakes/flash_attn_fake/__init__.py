"""What the fakes of all FlashAttention libraries share: the truth in float64, the checks, and the journal."""
