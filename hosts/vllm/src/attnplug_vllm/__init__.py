"""Every installed attention backend of attnplug as an attention backend of vLLM, through its own plugin interface."""
