"""A third-party backend of the tests: block-sparse attention on the CPU, in float32."""
