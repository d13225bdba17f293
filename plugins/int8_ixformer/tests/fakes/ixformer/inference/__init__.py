"""As the library has it."""
