"""An older version of the distribution attnplug-good."""
