"""A paged engine over unmodified transformers models: requests join and leave its batch at any step."""
