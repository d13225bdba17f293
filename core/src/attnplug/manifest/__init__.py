"""What is offered: a backend described as data in an attnplug.toml, read without importing anything of the plugin."""
