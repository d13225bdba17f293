"""Evidence: what runs of the conformance kit have shown of a candidate, as data."""
