"""The version of core. It is not looked up: metadata of another distribution may say that it is attnplug's."""

__version__ = "0.1.0"
